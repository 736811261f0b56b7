"""`torchrun -m tevatron.megatron.driver.distill_train`: train on a teacher's scores with the megatron backend."""

from __future__ import annotations

import sys

from tevatron.trainer.program.main import main

DEFAULTS = {"dtype": "bfloat16", "loss": "listwise_kl"}

if __name__ == "__main__":
    sys.exit(main(backend="megatron", defaults=DEFAULTS))
