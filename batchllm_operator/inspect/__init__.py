"""What only looks at a plan, simulates it, or cleans up after it."""
