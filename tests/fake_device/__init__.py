"""Fake GPU for the real torch.cuda and CuPy code: streams, events, an allocator and graphs (tests/README.md)."""
