"""Cost of a plan on a GPU, by a roofline model."""
