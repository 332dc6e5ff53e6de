"""Virtual time and network: the second driver of `swarmsched.node`."""
