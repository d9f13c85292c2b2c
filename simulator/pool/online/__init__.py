"""Online allocators: the CUDA driver, PyTorch's caching allocator, CnMem, and SuperNeurons' heap."""
