"""The async SDK and the `swarm` command."""
