"""Jobs that are killed, cut off, doubled and lied to, and what their tables hold in the end."""
