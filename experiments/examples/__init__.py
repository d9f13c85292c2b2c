"""Single-file example programs."""
