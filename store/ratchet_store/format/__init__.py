"""The format of checkpoint files: manifest file, safetensors header, JSON state, shard slices."""
