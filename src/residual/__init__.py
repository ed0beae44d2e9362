"""What the formula misses, learned from measured rows: a correction, and an upper bound to it."""
