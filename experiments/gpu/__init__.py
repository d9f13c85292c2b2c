"""What validate_gpu runs on a device: the networks, the rivals, the largest batch, the clock, the pictures."""
