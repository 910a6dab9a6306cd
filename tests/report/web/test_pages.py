"""What the pages of runs show, and what they say when there is nothing to show."""
