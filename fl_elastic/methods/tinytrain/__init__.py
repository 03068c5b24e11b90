"""TinyTrain (Kwon et al., ICML 2024): choose layers by Fisher potential, then their best channels."""

policies = {
    "tinytrain": "policy",
    "tinytrain_in": "policy",
}
