"""Pinned host memory, device memory for CUDA graphs, and the copy engines between host and device."""

import torch

ALIGNMENT = 512  # address alignment in bytes: the finest that PyTorch's allocator uses


def cuda_index(device: torch.device) -> int:
    """Returns the index of a CUDA device; a device without an index is the current one."""
    return torch.cuda.current_device() if device.index is None else device.index
