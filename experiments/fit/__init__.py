"""Will it fit? What ``experiments.plan`` asks and answers."""
