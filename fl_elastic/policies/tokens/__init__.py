"""Go on with the tokens that a transformer's class token attends to: BSR, and the tokens of Tri-Level E-ViT."""
