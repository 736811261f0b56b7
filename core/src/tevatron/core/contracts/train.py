"""Every flag of training, with its default and meaning, once for the command line, REST and both backends.

The command line is built from these fields (`--train_group_size 8`); `aliases()` gives the reference's other
spellings. A backend that does not honour a flag refuses it by name.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tevatron.core.contracts.megatron import MegatronArguments
from tevatron.core.errors import ConfigError


class LossName(StrEnum):
    """Names of the training losses; the registry is `tevatron.trainer.program.losses`."""

    CONTRASTIVE = "contrastive"
    LISTWISE_KL = "listwise_kl"
    MARGIN_MSE = "margin_mse"
    RANKNET = "ranknet"
    LISTNET = "listnet"


class Head(StrEnum):
    """How a model turns the last token into a score."""

    YES_NO = "yes_no"
    SEQ_CLS = "seq_cls"


TrackerName = Literal["wandb", "mlflow"]
"""Where the metrics of a run can be sent to."""


class TrainArguments(BaseModel):
    """What a training run can be told. Lengths in tokens, batch sizes in queries."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    # The prompt
    prompt_template: str = "tevatron"
    """Name of the prompt template."""
    query_prefix: str | None = None
    """Text before the query; the template's own when unset."""
    passage_prefix: str | None = None
    """Text before the passage; the template's own when unset."""
    rerank_max_len: int = Field(
        default=512, ge=16, le=131072, json_schema_extra={"aliases": ["max_seq_len"]}
    )
    """Longest prompt; only the passage is shortened to fit."""
    append_eos_token: bool = False
    """End a `pair` prompt with the tokenizer's EOS (seq_cls heads only)."""
    head: Head = Field(default=Head.YES_NO, strict=False)
    """`yes_no` scores with the language-model head, `seq_cls` with a new one-label head."""

    # The data
    train_group_size: int = Field(default=8, ge=2, le=1024)
    """Passages a query: one positive and this many minus one negatives; one alone has nothing to be compared with."""
    positive_passage_no_shuffle: bool = False
    """Always take the first positive."""
    negative_passage_no_shuffle: bool = False
    """Always take the first negatives."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Decides sampling, order, dropout and new weights."""

    # The loss
    loss: LossName = Field(default=LossName.CONTRASTIVE, strict=False)
    """Training loss over the scores of a group."""
    teacher_temp: float = Field(default=1.0, gt=0)
    """Divides the teacher's scores in listwise_kl and listnet."""
    student_temp: float = Field(default=1.0, gt=0)
    """Divides the model's scores in contrastive, listwise_kl and listnet."""

    # The steps
    per_device_train_batch_size: int = Field(
        default=8, ge=1, json_schema_extra={"aliases": ["micro_batch_size"]}
    )
    """Queries a rank and micro batch."""
    gradient_accumulation_steps: int = Field(
        default=1, ge=1, json_schema_extra={"aliases": ["num_micro_batches"]}
    )
    """Micro batches a step."""
    num_train_epochs: float = Field(
        default=1.0, gt=0, json_schema_extra={"aliases": ["num_epochs"]}
    )
    """Passes over the data; max_steps wins."""
    max_steps: int = Field(default=-1, ge=-1, json_schema_extra={"aliases": ["total_steps"]})
    """Optimizer steps in all; -1 means by epochs."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of a cosine schedule."""
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    """Schedule after the warm-up."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the steps spent warming up; used where warmup_steps is 0."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps spent warming up from 0."""
    weight_decay: float = Field(default=0.01, ge=0)
    """AdamW's decoupled weight decay; biases and norms are left out."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first beta."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's second beta."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(default=1.0, ge=0, json_schema_extra={"aliases": ["grad_clip"]})
    """Gradient norm above which gradients are scaled down; 0 turns it off."""

    # Numbers and memory
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Arithmetic of forward and backward; weights of full fine-tuning stay fp32 masters."""
    gradient_checkpointing: bool = Field(
        default=False, json_schema_extra={"aliases": ["recompute_enabled"]}
    )
    """Recompute activations in the backward pass."""
    packing: bool = True
    """Pack prompts without padding; off pads each micro batch. The losses are the same."""
    packing_max_tokens: int = Field(default=8192, ge=16)
    """Token budget of one packed forward pass; never below one group's longest prompt."""
    pad_to_multiple_of: int = Field(default=16, ge=1)
    """Padded length is a multiple of this (packing off)."""
    # No free text: transformers would fetch `owner/name` from the hub and run it.
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    """Attention of transformers when packing is off; `sdpa` when unset."""
    torch_compile: bool = False
    """Compile the layers first: minutes at the start, faster steps (hf backend, on one GPU or DDP)."""
    fsdp: Literal["", "full_shard", "shard_grad_op"] = ""
    """Shard with FSDP over the ranks of a GPU run."""

    # LoRA
    use_lora: bool = Field(default=False, json_schema_extra={"aliases": ["lora"]})
    """Train low-rank adapters in place of all weights."""
    lora_r: int = Field(default=16, ge=1, json_schema_extra={"aliases": ["lora_rank"]})
    """Rank of the adapters."""
    lora_alpha: int = Field(default=32, ge=1)
    """Scale of the adapters."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapters."""
    lora_target_groups: list[str] | None = None
    """Named groups to adapt: attn, mlp, moe_experts, moe_shared, moe_router."""
    lora_target_modules: list[str] | None = None
    """Module names to adapt; a group wins where both are given."""

    # Saving
    save_steps: int = Field(default=100, ge=1, json_schema_extra={"aliases": ["save_interval"]})
    """Save a resumable state every this many steps."""
    save_total_limit: int = Field(default=2, ge=1)
    """Resumable states that are kept."""
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Weights of the published checkpoint; the training dtype when unset."""
    export_form: Literal["merged", "adapter"] = "merged"
    """What a LoRA run publishes: the whole model with the adapters in it, or the adapters alone in PEFT's format."""
    logging_steps: int = Field(default=10, ge=1, json_schema_extra={"aliases": ["log_interval"]})
    """Write an event every this many steps, and at the last one."""

    # Tracking
    report_to: list[TrackerName] = []
    """Send the metrics to `wandb` or `mlflow` too; TensorBoard's files are always written."""
    wandb_project: str | None = Field(default=None, min_length=1, max_length=128)
    """Project of W&B, which this turns on."""
    wandb_entity: str | None = Field(default=None, min_length=1, max_length=128)
    """User or team of W&B that the project is of; the key's own when unset."""
    run_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        json_schema_extra={"aliases": ["wandb_run_name"]},
    )
    """What the trackers call the run; they think of a name when unset."""

    # Validation
    eval_steps: int = Field(default=0, ge=0)
    """Score the held-out rows every this many steps, and at the last one; 0 never does."""
    metric_for_best_model: Literal["loss", "ndcg@10"] = "loss"
    """Which number of an evaluation decides: the lowest loss, or the highest ndcg@10, is the best."""
    load_best_model_at_end: bool = False
    """Keep the state of the best evaluation, and publish that one in place of the last."""
    early_stopping_patience: int = Field(default=0, ge=0)
    """End after this many evaluations in a row that are no better than the best; 0 trains all steps."""

    megatron: MegatronArguments = Field(default_factory=MegatronArguments)
    """What only the megatron backend has; the hf backend refuses anything but the defaults."""

    @property
    def trackers(self) -> list[TrackerName]:
        """Where the metrics are sent to."""
        asked = {*self.report_to, *(["wandb"] if self.wandb_project else [])}
        return [name for name in get_args(TrackerName) if name in asked]

    @model_validator(mode="after")
    def _entity_needs_wandb(self) -> Self:
        if self.wandb_entity and "wandb" not in self.trackers:
            raise ValueError(
                f"wandb_entity '{self.wandb_entity}' needs wandb_project, or report_to 'wandb'"
            )
        return self

    @model_validator(mode="after")
    def _adapters_need_lora(self) -> Self:
        if self.export_form == "adapter" and not (self.use_lora and self.head is Head.YES_NO):
            raise ValueError(
                f"export_form 'adapter' needs use_lora and head 'yes_no', got use_lora {self.use_lora} and head '{self.head}'"
            )
        return self

    @model_validator(mode="after")
    def _best_needs_evaluations(self) -> Self:
        if self.load_best_model_at_end and not self.eval_steps:
            raise ValueError("load_best_model_at_end needs evaluations, got eval_steps 0")
        if self.early_stopping_patience and not self.load_best_model_at_end:
            raise ValueError(
                f"early_stopping_patience {self.early_stopping_patience} needs load_best_model_at_end: "
                "what it ends with is so many evaluations past the best"
            )
        if self.metric_for_best_model != "loss" and not self.load_best_model_at_end:
            raise ValueError(
                f"metric_for_best_model '{self.metric_for_best_model}' decides nothing without load_best_model_at_end"
            )
        return self


def check_validation(arguments: TrainArguments, *, is_given: bool, name: str) -> None:
    """Raise `ValueError` unless a held-out set and the steps at which it is scored come together.

    Args:
        arguments: With `eval_steps`.
        is_given: Whether there is a set.
        name: What its field is called.
    """
    if not is_given and arguments.eval_steps:
        raise ValueError(f"eval_steps {arguments.eval_steps} needs {name}, the held-out rows")
    if is_given and not arguments.eval_steps:
        raise ValueError(f"{name} is given, but eval_steps is 0: nothing would be scored")


def check_hf(arguments: TrainArguments, *, num_ranks: int) -> None:
    """Raise `ConfigError` for what the hf backend does on no machine, naming the flag."""
    if arguments.megatron != MegatronArguments():
        given = ", ".join(sorted(arguments.megatron.model_fields_set))
        raise ConfigError(f"megatron: {given} is not honoured by the hf backend")
    if arguments.fsdp and num_ranks == 1:
        raise ConfigError(f"--fsdp {arguments.fsdp} needs at least 2 ranks, got 1")
    if arguments.torch_compile and arguments.fsdp:
        raise ConfigError(
            "--torch_compile is not honoured with --fsdp, whose hooks stand in the layers"
        )
    if arguments.attn_implementation and arguments.packing:
        raise ConfigError("--attn_implementation is honoured with --packing false only")
    _check_schedule(arguments)


def check_megatron(arguments: TrainArguments) -> None:
    """Raise `ConfigError` for what the megatron backend does on no machine, naming the flag."""
    if arguments.head is not Head.YES_NO:
        raise ConfigError(
            f"head '{arguments.head}': the megatron backend trains 'yes_no' heads; use the hf backend"
        )
    if arguments.fsdp:
        raise ConfigError(
            f"--fsdp {arguments.fsdp} is a flag of the hf backend; here the optimizer is sharded, and "
            "--tensor_model_parallel_size or --pipeline_model_parallel_size cut the weights"
        )
    for name in ("attn_implementation", "torch_compile"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name} is a flag of the hf backend")
    context = arguments.megatron.context_parallel_size
    if context > 1 and not arguments.packing:
        raise ConfigError(
            f"context_parallel_size {context} needs packed prompts, without --no_packing"
        )
    _check_sharding(arguments)
    _check_schedule(arguments)


def _check_sharding(arguments: TrainArguments) -> None:
    if not arguments.megatron.use_megatron_fsdp:
        return
    if arguments.use_lora:
        raise ConfigError(
            "use_megatron_fsdp is for full fine-tuning: with --use_lora few weights have gradients and an optimizer"
        )
    if not arguments.megatron.use_distributed_optimizer:
        raise ConfigError(
            "use_megatron_fsdp needs use_distributed_optimizer, which was switched off"
        )
    if arguments.dtype == "float16":
        raise ConfigError("use_megatron_fsdp trains in bfloat16 or float32, got --dtype float16")


def _check_schedule(arguments: TrainArguments) -> None:
    if arguments.min_lr and arguments.lr_scheduler_type != "cosine":
        raise ConfigError(
            f"--min_lr is honoured with --lr_scheduler_type cosine, not with '{arguments.lr_scheduler_type}'"
        )
    if arguments.min_lr > arguments.learning_rate:
        raise ConfigError(
            f"--min_lr {arguments.min_lr:g} is above --learning_rate {arguments.learning_rate:g}"
        )


def aliases() -> dict[str, str]:
    """Map every other spelling of a flag to the field that it means."""
    found: dict[str, str] = {}
    for name, field in TrainArguments.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict):
            listed = extra.get("aliases", [])
            if isinstance(listed, list):
                found.update({str(alias): name for alias in listed})
    return found
