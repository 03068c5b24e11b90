"""Windows of channels, as in SliceOut (Notin et al., 2020): each step runs a part of every inner width."""

policies = {"slice_out": "policy", "slice_out_fit": "policy"}
