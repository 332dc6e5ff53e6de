"""What the swarm knows of how jobs train: speed, worth of batches, work left; fitted, never told by an oracle."""
