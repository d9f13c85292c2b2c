"""Memory check of a training step: does it fit, and the cheapest plan if it does not."""
