"""What an agent keeps on disk: one SQLite file per node, used by one agent at a time."""
