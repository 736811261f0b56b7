"""Small tensors on their way to a GPU that is still busy with what it was given before, and back."""

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


class Coming:
    """A tensor on its way to the CPU, behind what its GPU has been given so far and before what it is given next."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """Return it once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
