"""Megatron's optimizer with the shared arguments, and the learning rate of each step.

The rates are those of transformers' schedules, which the hf backend trains with.
"""

from __future__ import annotations

import math
from typing import Any

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.nn.loading import DTYPES
from tevatron.trainer.program.backends.megatron.model import MegatronModel


def make_optimizer(model: MegatronModel, arguments: TrainArguments) -> Any:
    """Return the optimizer of this rank's trainable parameters."""
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=arguments.learning_rate,
            min_lr=arguments.min_lr,
            weight_decay=arguments.weight_decay,
            adam_beta1=arguments.adam_beta1,
            adam_beta2=arguments.adam_beta2,
            adam_eps=arguments.adam_epsilon,
            clip_grad=arguments.max_grad_norm,
            bf16=arguments.dtype == "bfloat16",
            fp16=arguments.dtype == "float16",
            params_dtype=DTYPES[arguments.dtype],
            use_distributed_optimizer=arguments.megatron.use_distributed_optimizer,
        ),
        model.chunks,
    )


def set_rate(optimizer: Any, rate: float) -> None:
    """Give every group of parameters this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def learning_rate(step: int, *, total_steps: int, arguments: TrainArguments) -> float:
    """Return the rate of the step that is the `step`th, counted from 0."""
    peak = arguments.learning_rate
    warmup = arguments.warmup_steps or math.ceil(arguments.warmup_ratio * total_steps)
    if step < warmup:
        return peak * step / max(1, warmup)
    if arguments.lr_scheduler_type == "constant":
        return peak
    done = (step - warmup) / max(1, total_steps - warmup)
    if arguments.lr_scheduler_type == "linear":
        return peak * max(0.0, 1 - done)
    cosine = max(0.0, 0.5 * (1 + math.cos(math.pi * done)))
    return arguments.min_lr + (peak - arguments.min_lr) * cosine
