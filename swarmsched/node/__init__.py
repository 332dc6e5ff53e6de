"""One node of the swarm: composes the machines behind a single `step`."""
