"""The table's rows, checked and made into prompts."""
