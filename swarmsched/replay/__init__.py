"""Replays of recorded workloads: jobs with measured physics, decided on by the policies that agents run."""
