"""What attempts at shards leave in the lake, and what is read from it: parts, progress, status."""
