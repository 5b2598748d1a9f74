"""How gradients of batches scatter around the full gradient of a model at one point."""
