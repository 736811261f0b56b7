"""What the two measuring processes of the training benchmark share: the device's clock and memory, and how they report."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from train_cases import Case, Measured


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the CPU in a smoke run."""

    torch_device: torch.device

    @property
    def is_gpu(self) -> bool:
        """Whether times and memory mean anything."""
        return self.torch_device.type == "cuda"

    @property
    def name(self) -> str:
        """As the driver calls it."""
        return torch.cuda.get_device_name() if self.is_gpu else "CPU"

    def synchronize(self) -> None:
        """Wait for what was started."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        """Forget the memory of the warm-up."""
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Return the most that was allocated, 0 on a CPU."""
        return torch.cuda.max_memory_allocated() if self.is_gpu else 0


def profile(out: Path, step: Callable[[], object]) -> None:
    """Write what the step spends on the device and on the host, longest first."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        step()
    averages = seen.key_averages()
    tables = [
        averages.table(sort_by=key, row_limit=45, max_name_column_width=90)
        for key in ("self_cuda_time_total", "self_cpu_time_total")
    ]
    out.write_text("\n".join(tables))


def run_case(measure: Callable[[Case], Measured]) -> None:
    """Measure the case of the command line on this rank; rank 0 writes what it saw, any rank that memory ran out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", type=Case.from_json)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    try:
        found = measure(args.case)
    except torch.OutOfMemoryError:
        device = Device(torch.device("cuda"))
        peak = device.peak_bytes()
        write(
            args.out,
            Measured(step_seconds=[], peak_bytes=peak, gpu=device.name, note="out of memory"),
        )
        # The other ranks may wait for this one; the launcher ends them.
        os._exit(1)
    if int(os.environ["RANK"]) == 0:
        write(args.out, found)
    # Not through the exit handlers, which wait for groups that may be gone.
    os._exit(0)


def write(out: Path, found: Measured) -> None:
    """Write it whole or not at all."""
    beside = out.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(asdict(found)))
    beside.rename(out)
