"""The aggregator of a node: a child process that holds shards of jobs' outer weights, and the agent's side of it."""
