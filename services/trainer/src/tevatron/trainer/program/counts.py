"""What a rank did since the last log: pairs, tokens and time, and the memory that it took. Knows no model."""

from __future__ import annotations

import resource
import time

import torch

from tevatron.trainer.program.data.groups import Group


class Counts:
    """Sums of a rank since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._pairs = self._tokens = self._truncated = 0
        self.num_passes = 0

    def add(self, groups: list[Group], *, num_passes: int) -> None:
        """Count groups that were trained on, in so many forward passes."""
        for group in groups:
            self._pairs += len(group.prompts)
            self._tokens += sum(len(prompt) for prompt in group.prompts)
            self._truncated += group.num_truncated
        self.num_passes += num_passes

    def leave_out(self, seconds: float) -> None:
        """Do not count this time, in which nothing was trained."""
        self._start += seconds

    def totals(self) -> list[float]:
        """Return pairs, tokens, truncated pairs, and seconds."""
        return [self._pairs, self._tokens, self._truncated, time.monotonic() - self._start]


def memory_bytes(device: torch.device) -> int:
    """Return the peak: of the GPU's allocator, or of the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
