"""Agents on named tasks; what `suite=speed` (`make bench`) times, and the peer it is timed against."""
