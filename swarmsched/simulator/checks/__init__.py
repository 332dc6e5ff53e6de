"""Observers that hold a simulated swarm to the protocol's invariants.

They keep their own books from what they see and share no code with the machines that they check.  `suite` puts all of
them together; docs/explanation/invariants.md says how each is checked and what it cannot see.
"""
