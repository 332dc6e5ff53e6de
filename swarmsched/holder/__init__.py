"""What a node owes the jobs whose records it holds, and what it needs to act for those that it shepherds."""
