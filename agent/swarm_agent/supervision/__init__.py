"""Processes of jobs: the shim that outlives the agent, its records and logs, and the runner that drives them."""
