"""What a plan costs on a GPU: a roofline model."""
