"""TrainArguments as transformers' TrainingArguments, and which of its other names may be given beside them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from transformers import TrainingArguments

from tevatron.core.contracts.train import TrainArguments, check_hf
from tevatron.core.errors import ConfigError
from tevatron.trainer.program.settings import hide_torchrun

PASSED_ON = frozenset(
    {
        "adam_epsilon",
        "dataloader_num_workers",
        "ddp_backend",
        "ddp_bucket_cap_mb",
        "ddp_timeout",
        "full_determinism",
        "log_level",
        "log_level_replica",
        "logging_first_step",
        "optim",
        "optim_args",
        "tf32",
        "torch_empty_cache_steps",
        "use_cpu",
    }
)
"""Names of TrainingArguments that are handed to the Trainer as they are."""

HARMLESS = frozenset(
    {"do_train", "remove_unused_columns", "ddp_find_unused_parameters", "logging_dir", "local_rank"}
)
"""Names that scripts set by habit and that change nothing here."""

KNOWN = frozenset(field.name for field in dataclasses.fields(TrainingArguments))
"""Every name of TrainingArguments, to tell one that is not honoured from one that does not exist."""


def check_arguments(arguments: TrainArguments, *, num_ranks: int) -> None:
    """Raise `ConfigError` for what this backend cannot do, here or anywhere, naming the flag."""
    on_gpu = torch.cuda.is_available()
    if arguments.fsdp and not on_gpu:
        raise ConfigError(
            f"--fsdp {arguments.fsdp} needs GPUs: without them the ranks would silently train as DDP. Leave --fsdp out."
        )
    if arguments.dtype == "float16" and not on_gpu:
        raise ConfigError("--dtype float16 needs a GPU; on a CPU use bfloat16 or float32")
    check_hf(arguments, num_ranks=num_ranks)


def training_arguments(
    arguments: TrainArguments, run_dir: Path, *, num_ranks: int, others: Mapping[str, JsonValue]
) -> TrainingArguments:
    """Return the Trainer's own arguments; making them joins the ranks. `set_length` completes them."""
    for name in others:
        if name not in PASSED_ON:
            raise ConfigError(f"hf_arguments: '{name}' is not honoured by the hf backend")
    schedule, schedule_options = _schedule(arguments)
    on_cpu = not torch.cuda.is_available()
    own: dict[str, object] = {
        "output_dir": str(run_dir),
        "per_device_train_batch_size": arguments.per_device_train_batch_size,
        "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
        "max_steps": 1,
        "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": schedule,
        "lr_scheduler_kwargs": schedule_options,
        "weight_decay": arguments.weight_decay,
        "adam_beta1": arguments.adam_beta1,
        "adam_beta2": arguments.adam_beta2,
        "adam_epsilon": arguments.adam_epsilon,
        "max_grad_norm": arguments.max_grad_norm,
        "seed": arguments.seed,
        "bf16": arguments.dtype == "bfloat16",
        "fp16": arguments.dtype == "float16",
        "logging_steps": arguments.logging_steps,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": arguments.save_steps,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": on_cpu,
        "ddp_backend": "gloo" if on_cpu and num_ranks > 1 else None,
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
        "dataloader_pin_memory": False,
        "average_tokens_across_devices": False,
        "remove_unused_columns": False,
    }
    if arguments.fsdp:
        own["fsdp"] = True
        # Without it micro batches would hold whole gradients, which is what sharding is there to avoid.
        own["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        own["fsdp_config"] = {"reshard_after_forward": arguments.fsdp == "full_shard"}
    values: dict[str, Any] = {**own, **others}
    if num_ranks == 1:
        # Accelerate would wrap even a single rank of torchrun in DDP, for a second copy of all gradients.
        hide_torchrun()
    made = TrainingArguments(**values)
    # One process that sees several GPUs would be run under DataParallel, which cannot take packed rows apart.
    made.device  # noqa: B018  it counts the GPUs when it is first asked for
    made._n_gpu = min(made.n_gpu, 1)
    return made


def set_length(made: TrainingArguments, arguments: TrainArguments, *, total_steps: int) -> None:
    """Set what depends on the number of steps, which is known when the data is."""
    made.max_steps = total_steps
    made.warmup_steps = arguments.warmup_steps or math.ceil(arguments.warmup_ratio * total_steps)


def _schedule(arguments: TrainArguments) -> tuple[str, dict[str, float]]:
    if arguments.lr_scheduler_type == "cosine" and arguments.min_lr:
        return "cosine_with_min_lr", {"min_lr": arguments.min_lr}
    if arguments.lr_scheduler_type == "constant":
        return "constant_with_warmup", {}
    return arguments.lr_scheduler_type, {}
