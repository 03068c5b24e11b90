"""One choice of a mode for every group under time, memory and uplink together."""

policies = {"joint": "policy"}
