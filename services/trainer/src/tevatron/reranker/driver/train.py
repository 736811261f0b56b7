"""`torchrun -m tevatron.reranker.driver.train`, or `python -m`: train a reranker with the hf backend."""

from __future__ import annotations

import sys

from tevatron.trainer.program.main import main

if __name__ == "__main__":
    sys.exit(main())
