"""What runs on the device, in Triton's language."""
