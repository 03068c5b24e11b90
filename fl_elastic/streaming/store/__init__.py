"""The sample store of a stream: bounded in size, and safe if a process is killed."""
