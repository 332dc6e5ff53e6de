"""Jobs: their register (plane C) and their life cycle."""
