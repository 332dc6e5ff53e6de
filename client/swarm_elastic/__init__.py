"""What a training script may import: standard library and the script's own torch, nothing else."""
