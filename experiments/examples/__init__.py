"""Programs to be read from top to bottom."""
