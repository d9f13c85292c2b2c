"""Will it fit? What a training step needs, and the cheapest plan where it does not fit."""
