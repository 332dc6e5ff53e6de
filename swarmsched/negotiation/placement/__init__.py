"""Which waiting job may try to be placed now, and where: the queue, starts that need no plan, and plans as told."""
