"""Static analysis of a training script by its syntax tree."""
