"""Upload checkpoints to an object store and download them."""
