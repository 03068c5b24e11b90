"""Policy "joint": a joint choice of every group's mode under time, memory and uplink limits."""

policies = {"joint": "policy"}
