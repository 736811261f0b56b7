"""TEST ONLY: with this folder on PYTHONPATH, the ranks that torchrun starts run Megatron on the CPU (cpu_shim)."""

import os
import sys
from pathlib import Path

if "RANK" in os.environ:
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.megatron import cpu_shim

    cpu_shim.install()
