"""A second driver of the same nodes: a whole swarm in one process, in virtual time, with faults drawn from a seed.

Nothing here decides anything about jobs or members; the nodes do, and they are the objects that run in production.
"""
