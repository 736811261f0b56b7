"""One optimizer step, and scores without one: Megatron's schedule over the passes of a step.

Owns how a loss over groups becomes Megatron's: summed over the groups of all passes and replicas, so that neither
packing nor the layout changes it. It knows nothing of files, events or when to stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.nn.forward import YesNoHead
from tevatron.core.nn.sending import sent
from tevatron.trainer.program.backends.megatron.adapted import shared_adapters, sum_gradients
from tevatron.trainer.program.backends.megatron.data import share_evenly
from tevatron.trainer.program.backends.megatron.model import MegatronModel
from tevatron.trainer.program.backends.megatron.optimizer import set_rate
from tevatron.trainer.program.backends.megatron.parallel import Ranks
from tevatron.trainer.program.backends.megatron.passes import Cut, Pass, choose_passes, make_pass
from tevatron.trainer.program.backends.megatron.scoring import AnswerScores
from tevatron.trainer.program.data.groups import Group
from tevatron.trainer.program.losses import Temperatures, get_loss
from tevatron.trainer.program.validation import pack_prompts


class StepNumbers(NamedTuple):
    """What a step gave, the same on every rank."""

    loss: float
    """Mean over the step's groups."""
    grad_norm: float
    """Before clipping."""
    num_passes: int


@dataclass(frozen=True, slots=True)
class Engine:
    """A model with its optimizer on this rank."""

    model: MegatronModel
    optimizer: Any
    ranks: Ranks
    arguments: TrainArguments
    scores: AnswerScores

    @classmethod
    def of(
        cls,
        model: MegatronModel,
        optimizer: Any,
        ranks: Ranks,
        *,
        arguments: TrainArguments,
        head: YesNoHead,
        softcap: float | None,
    ) -> Engine:
        """Join the parts and tell Megatron's schedule about them."""
        config = model.config
        shared = [one for chunk in model.chunks for one in shared_adapters(chunk)]
        config.finalize_model_grads_func = partial(_finish_gradients, shared)
        config.grad_scale_func = optimizer.scale_loss
        config.no_sync_func = model.chunks[0].no_sync
        return cls(model, optimizer, ranks, arguments, AnswerScores(head, softcap))

    def step(self, groups: list[Group], *, rate: float) -> StepNumbers:
        """Train on the groups of this replica; every rank must call it."""
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        set_rate(self.optimizer, rate)
        if self.arguments.packing:
            groups = share_evenly(groups)
        passes = choose_passes(groups, self.arguments)
        # Ranks meet in every pass: in the stages of the pipeline and where tokens are sent to their experts.
        num_passes = self.ranks.most(len(passes))
        passes += [[]] * (num_passes - len(passes))
        losses = self._run(passes, partial(self._loss, num_passes), forward_only=False)
        _, grad_norm, _ = self.optimizer.step()
        total = float(sum(float(loss) for loss in losses)) if losses else 0.0
        # Every tensor- and context-parallel rank of the last stage has the same loss; the other stages have none.
        layout = self.ranks.layout
        loss = self.ranks.sums([total])[0] / (layout.tensor * layout.context)
        # None where fp16's loss scaling met an infinite gradient and left the step out.
        norm = math.inf if grad_norm is None else float(grad_norm)
        return StepNumbers(loss=loss, grad_norm=norm, num_passes=num_passes)

    def score(self, prompts: Sequence[Sequence[int]]) -> list[float]:
        """Return one score a prompt, on every rank; every rank must call it, those of one replica with the same prompts."""
        self.model.train(False)
        bins = pack_prompts(prompts, self.arguments)
        groups = [
            Group(
                prompts=[list(prompts[index]) for index in indices],
                teacher=None,
                num_groups=1,
                num_truncated=0,
            )
            for indices in bins
        ]
        passes = [[group] for group in groups]
        # Experts are met in every pass, also by a replica that has no prompts left.
        passes += [[]] * (self.ranks.most(len(passes)) - len(passes))
        with torch.no_grad():
            found = self._run(
                passes,
                lambda made, scores_P: (scores_P.sum(), scores_P),
                forward_only=True,
            )
        self.model.train(True)
        order = [index for indices in bins for index in indices]
        scores = torch.zeros(len(prompts), dtype=torch.float64, device=self.ranks.device)
        if found and order:
            scores[order] = torch.cat(found)[: len(order)].to(scores)
        # As many ranks of a replica have them as share the last stage.
        torch.distributed.all_reduce(scores, group=parallel_state.get_model_parallel_group())
        own: list[float] = (scores / self.ranks.layout.tensor).tolist()
        return own

    def _pass(self, groups: list[Group]) -> Pass:
        config = self.model.config
        return make_pass(
            groups,
            packed=self.arguments.packing,
            pad_to_multiple_of=self.arguments.pad_to_multiple_of,
            num_shards=self.ranks.layout.tensor if config.sequence_parallel else 1,
            cut=Cut(
                parallel_state.get_context_parallel_rank(),
                parallel_state.get_context_parallel_world_size(),
            ),
            device=self.ranks.device,
        )

    def _run(
        self,
        passes: list[list[Group]],
        reduce: Callable[[Pass, Tensor], tuple[Tensor, Tensor]],
        *,
        forward_only: bool,
    ) -> list[Tensor]:
        """Run the schedule; returns what `reduce` keeps of each pass, on the last stage only."""
        results: list[Tensor] = get_forward_backward_func()(
            forward_step_func=partial(self._forward, reduce),
            # A pass's tensors are made while a GPU works on the one before.
            data_iterator=(self._pass(groups) for groups in passes),
            model=self.model.chunks,
            num_microbatches=len(passes),
            # Both are of no meaning with rows of any length.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results if parallel_state.is_pipeline_last_stage() else []

    def _forward(
        self,
        reduce: Callable[[Pass, Tensor], tuple[Tensor, Tensor]],
        passes: Iterator[Pass],
        model: Any,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        made = next(passes)
        is_moe = bool(self.model.config.num_moe_experts)
        output = model(
            input_ids=made.input_ids,
            position_ids=made.position_ids,
            attention_mask=None,
            packed_seq_params=made.packing,
            padding_mask=made.is_padding if is_moe else None,
            output_processor=self.scores,
            output_processor_context=made.last,
        )
        return output, partial(reduce, made)

    def _loss(self, num_passes: int, made: Pass, scores_P: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pass's loss as Megatron takes it, and its share of the step's mean for the log."""
        if not made.groups:
            return scores_P.sum() * 0.0, torch.zeros((), device=scores_P.device)
        scores_NG = scores_P.view(len(made.groups), -1)
        teacher_NG = None
        if made.groups[0].teacher is not None:
            teacher = torch.tensor([group.teacher for group in made.groups])
            teacher_NG = sent(teacher, scores_NG.device)
        temperatures = Temperatures(
            student=self.arguments.student_temp, teacher=self.arguments.teacher_temp
        )
        losses_N = get_loss(self.arguments.loss).function(scores_NG, teacher_NG, temperatures)
        share = losses_N.sum() / made.groups[0].num_groups
        # Megatron takes the mean over passes and over replicas, and divides in place: the log has a copy. It allows for
        # the context-parallel ranks, each of which has the gradient of its own tokens, by itself.
        return share * num_passes * self.ranks.layout.data, share.detach().clone()


def _finish_gradients(shared: list[nn.Parameter], *args: Any, **kwargs: Any) -> None:
    """Join the gradients of a step's passes over the ranks, as Megatron's schedule asks for."""
    finalize_model_grads(*args, **kwargs)
    sum_gradients(shared)
