"""Pinned host memory, device memory for CUDA graphs, and the copy engines between host and device."""

import torch

ALIGNMENT = 512  # address alignment in bytes: the finest that PyTorch's allocator uses


def cuda_index(device: torch.device) -> int:
    """Returns the index of a CUDA device; a device without an index is the current one."""
    return torch.cuda.current_device() if device.index is None else device.index


def cache_bytes(device: torch.device) -> int:
    """Returns the bytes of a GPU's L2 cache, or an upper bound of a CPU core's private cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 2**22
