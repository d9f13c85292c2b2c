"""Allocators that see one malloc or free after another: the driver, PyTorch's, CnMem, SuperNeurons' heap."""
