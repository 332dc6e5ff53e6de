"""Checkpoints: where tasks write them, how they are copied and made known to the job's register, how they come back."""
