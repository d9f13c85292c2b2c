"""One fake GPU under the real torch.cuda and CuPy code: streams, events, an allocator, graphs (tests/README.md)."""
