"""What `make bench` times, and the peer it is timed against."""
