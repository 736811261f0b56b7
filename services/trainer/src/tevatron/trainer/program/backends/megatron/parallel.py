"""Joins the ranks and gives Megatron its process groups, or says why that cannot be.

Nothing loads before the layout fits the model. It knows no model weights and no data.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from tevatron.core.contracts.megatron import MegatronArguments
from tevatron.core.layout import Layout
from tevatron.core.model_shape import ModelShape
from tevatron.trainer.program.settings import RankEnvironment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others."""

    layout: Layout
    device: torch.device
    rank: int
    data_rank: int
    """Which replica this rank belongs to; ranks of one replica read the same queries."""

    def barrier(self) -> None:
        """Wait for the other ranks."""
        dist.barrier()

    def most(self, number: int) -> int:
        """Return the largest of all ranks' numbers."""
        return int(self._reduced(number, dist.ReduceOp.MAX))

    def sums(self, numbers: list[float]) -> list[float]:
        """Return the sums over all ranks."""
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(number) for number in total]

    def _reduced(self, number: float, how: dist.ReduceOp.RedOpType) -> float:
        value = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(value, op=how)
        return float(value)


def check_layout(arguments: MegatronArguments, shape: ModelShape, *, world: int) -> Layout:
    """Return the layout, or raise `ConfigError` with the numbers that do not fit."""
    layout = arguments.layout(world)
    arguments.check(layout, shape)
    return layout


def join_ranks(layout: Layout, environment: RankEnvironment, *, seed: int) -> Ranks:
    """Start torch.distributed, Megatron's groups and its random generators."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(environment.local_rank)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", rank=environment.rank, world_size=environment.world_size
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
    )
    # Without Transformer Engine the tracker of inference is the one that runs on any device.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=not on_gpu)
    logger.info("layout %s on %d ranks", layout, layout.world)
    return Ranks(
        layout=layout,
        device=torch.device(torch.cuda.current_device()),
        rank=environment.rank,
        data_rank=parallel_state.get_data_parallel_rank(),
    )


def leave_ranks() -> None:
    """Give the groups up, so that rank 0 can go on alone without the others waiting in a collective."""
    if dist.is_initialized():
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def has_transformer_engine() -> bool:
    """Say whether Transformer Engine's layers can be used."""
    return importlib.util.find_spec("transformer_engine") is not None
