"""Shared aggregation: contributions of a job's learners become the next version of a range of its weights."""
