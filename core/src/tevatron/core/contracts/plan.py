"""What is asked of a plan before a training runs, and what it says. Memory in bytes a GPU."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tevatron.core.contracts.jobs import Ref, Spec
from tevatron.core.contracts.train import TrainArguments

GIB = 2**30


class PlanRequest(Spec):
    """Body of `POST /v1/jobs:plan`."""

    model: Ref
    """Base model: a registered model's id or name."""
    backend: Literal["hf", "megatron"] = "hf"
    """Which of the training backends it is for."""
    num_gpus: int = Field(default=1, ge=1, le=4096)
    """GPUs of the run."""
    gpu_gib: float = Field(default=139.0, gt=0)
    """Memory of one; the default is an H200's."""
    arguments: TrainArguments = Field(default_factory=TrainArguments)


class MemoryParts(BaseModel):
    """Where a GPU's memory goes at the peak; a stage's GPU with the most."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    weights: int
    """Of FSDP this GPU's share and what is gathered at the peak."""
    gradients: int
    """fp32, of what is trained; a GPU's share where they are sharded, twice under DDP, which sends copies."""
    optimizer: int
    """Two moments, and fp32 masters where the weights are not; this rank's share."""
    activations: int
    """Kept for the backward pass, of all passes in flight, autocast's copies of weights among it."""
    working: int
    """Buffers of kernels and of the optimizer step; measured, not derived."""

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


class PlannedLayout(BaseModel):
    """One layout and what it needs."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    layout: str
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    expert_model_parallel_size: int
    data_parallel_size: int
    fsdp: Literal["", "full_shard", "shard_grad_op"] = ""
    """The hf backend's flag; empty on one GPU and with DDP."""
    queries_per_step: int
    memory: MemoryParts
    total_bytes: int
    fits: bool


class Plan(BaseModel):
    """The layout asked for, and those that fit, best first."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    backend: Literal["hf", "megatron"]
    num_params: int
    num_trained: int
    tokens_per_pass: int
    gpu_bytes: int
    asked: PlannedLayout
    fitting: list[PlannedLayout]
    """With the least communication first."""
