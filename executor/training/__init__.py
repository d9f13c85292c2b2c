"""Real training steps under a plan: what runs when, where each tensor lies, who copies it."""
