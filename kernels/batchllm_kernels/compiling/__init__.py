"""Static proof: what a compiled kernel takes of a chip, what its code does, and its limits."""
