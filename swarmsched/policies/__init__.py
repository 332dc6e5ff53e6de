"""Scheduling policies: pure functions from a view of the swarm to an ordered plan with reasons."""
