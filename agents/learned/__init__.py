"""structure2vec, the deep Q-network on it, its experience buffer and training state, transfer between tasks."""
