"""`torchrun -m tevatron.megatron.driver.distill_train`: train on a teacher's scores with the megatron backend."""

from __future__ import annotations

from tevatron.trainer.program.main import leave, main

DEFAULTS = {"dtype": "bfloat16", "loss": "listwise_kl"}

if __name__ == "__main__":
    leave(
        main(driver="tevatron.megatron.driver.distill_train", backend="megatron", defaults=DEFAULTS)
    )
