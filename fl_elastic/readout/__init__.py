"""Where in a model a head reads, and which place is the best one."""
