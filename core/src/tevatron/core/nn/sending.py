"""Small tensors on their way to a GPU that is still busy with what it was given before."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on the device, without waiting for what a GPU still has to do before it gets there.

    `torch.tensor(..., device=)` and `.to(device)` wait: whoever launches kernels then cannot be ahead of the GPU.
    """
    if device.type != "cuda":
        return tensor
    # Pinning copies the memory as it is; an expanded tensor has one number at several places.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
