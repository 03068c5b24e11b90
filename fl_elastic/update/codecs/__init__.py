"""How the numbers of a partial update are written: one class per way, found by name."""
