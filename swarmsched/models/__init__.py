"""What the swarm knows of how jobs train: speed, worth of batches, work left; fitted, never told by an oracle."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of a process that fits and plans, before it imports numpy.

The matrices are small: a pool of threads per core costs memory, and on a busy machine most of the time.
"""
