"""`torchrun -m tevatron.megatron.driver.train`: train a reranker with the megatron backend."""

from __future__ import annotations

from tevatron.trainer.program.main import leave, main

# As the reference's driver of this name; a job says its dtype itself.
DEFAULTS = {"dtype": "bfloat16"}

if __name__ == "__main__":
    leave(main(driver="tevatron.megatron.driver.train", backend="megatron", defaults=DEFAULTS))
