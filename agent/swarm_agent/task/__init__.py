"""What a task on this node is made of: its account, its shim, the port of its rank 0 and the socket for its ranks."""
