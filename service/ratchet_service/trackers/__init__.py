"""Export of jobs to experiment trackers: TensorBoard, MLflow and W&B."""
