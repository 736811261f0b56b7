"""Make .venv-megatron and run the tests of the megatron backend in it; `make test-megatron` runs this."""

from __future__ import annotations

import sys

from environments import Environment, run_tests

MEGATRON = Environment(
    name="megatron", python="3.12", distributions=["core", "services/trainer"], size="5 GB"
)

if __name__ == "__main__":
    sys.exit(run_tests(MEGATRON, sys.argv[1:]))
