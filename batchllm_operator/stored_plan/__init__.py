"""A plan in the lake: its manifest, its data files, and the notes beside them."""
