"""What decides: pure state machines and policies, with no sockets, clocks, processes or hidden randomness."""
