"""A lake table and a model that any machine can make, for the demo and for tests."""
