"""A lake table and a model that can be built on any machine, for the demo and for tests."""
