"""Memory for copies and graphs, of the host, pinned, and of a device; the copy engines between them."""

import torch

ALIGNMENT = 512  # bytes, of addresses: PyTorch's allocator has no finer


def cuda_index(device: torch.device) -> int:
    """The number of a CUDA device; of one without a number, that of the current device."""
    return torch.cuda.current_device() if device.index is None else device.index
