"""A label for each row by one step, against generating it as text."""
