"""Stages that measure plans, training steps and PyTorch's methods on a GPU, and their results."""
