"""Plane D: the owner's ledger of GPUs, cores and memory, the only authority on what is booked here."""
