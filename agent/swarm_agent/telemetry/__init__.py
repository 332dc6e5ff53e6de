"""What this node has and how it is: GPUs through NVML in a child process, cores and memory through /proc.

Nothing is imported here, because the sampler child imports this package too and must stay small.
"""
