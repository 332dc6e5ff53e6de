"""What must be on the node before a task starts: files by content, and environments by requirements."""
