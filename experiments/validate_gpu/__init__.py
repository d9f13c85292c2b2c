"""Does the simulator say what a GPU does? The networks, the rivals, the largest batch, the clock, the pictures."""
