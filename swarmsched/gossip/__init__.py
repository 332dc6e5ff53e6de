"""Planes A and B: membership by SWIM with Lifeguard, and the gossiped state of nodes, jobs and settings."""
