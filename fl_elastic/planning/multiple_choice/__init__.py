"""The multiple-choice solver: a mode for every group under time, memory and uplink together."""
