"""Distribution of the gradients of batches around the full gradient of a model."""
