"""The benchmarks import each other as scripts do."""

import sys
from pathlib import Path

# Last: their names must hide nothing.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
