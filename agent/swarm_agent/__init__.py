"""What acts: one asyncio agent per GPU server, the only production driver of `swarmsched.node`."""
