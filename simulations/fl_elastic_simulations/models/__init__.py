"""Models that scenarios name, and pretrained weights for them."""
