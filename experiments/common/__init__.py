"""Shared infrastructure of the commands: configuration, result tables, workers, trackers."""
