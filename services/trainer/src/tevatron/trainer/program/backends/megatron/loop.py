"""The loop: steps, states and the log. What a step computes is the engine's; where a state lies is `program.states`'."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from tevatron.core.contracts.run import EXPORTS_NAME
from tevatron.trainer.program.backends.megatron.data import StepSampler, step_loader
from tevatron.trainer.program.backends.megatron.engine import Engine, StepNumbers
from tevatron.trainer.program.backends.megatron.optimizer import learning_rate
from tevatron.trainer.program.backends.megatron.state import (
    WEIGHTS,
    PendingSave,
    load_state,
    load_weights,
)
from tevatron.trainer.program.context import Run
from tevatron.trainer.program.counts import Counts, memory_bytes
from tevatron.trainer.program.data.groups import Group, GroupDataset
from tevatron.trainer.program.failures import NotFiniteError
from tevatron.trainer.program.states import State, begin_state, beside, commit_state
from tevatron.trainer.program.stopping import Request
from tevatron.trainer.program.validation import Scoring

logger = logging.getLogger(__name__)

_MOE_LOSSES = {
    "aux_loss": ["load_balancing_loss"],
    "seq_aux_loss": ["seq_load_balancing_loss"],
    "none": [],
}
"""Names under which Megatron keeps the losses of the routers."""


class Loop:
    """Trains an engine over a run's schedule."""

    def __init__(
        self,
        engine: Engine,
        run: Run,
        dataset: GroupDataset,
        *,
        publish: Callable[[int], Path | None],
    ) -> None:
        """`publish` makes a checkpoint of a step, on every rank, and returns its folder on rank 0."""
        self._engine = engine
        self._publish = publish
        self._run = run
        self._dataset = dataset
        self._open_loss = 0.0
        self._logged_step = 0
        self._saved_step = 0
        self._pending: _Pending | None = None
        self._counts = Counts()

    def train(self, state: State | None) -> int:
        """Train to the end or until asked to stop; return the last step, whose state is saved."""
        step = self._resume(state)
        if state is not None and self._run.is_complete(state):
            return step
        sampler = StepSampler(
            self._run.schedule,
            self._run.sampling,
            data_rank=self._engine.ranks.data_rank,
            first_step=step,
        )
        on_gpu = self._engine.ranks.device.type == "cuda"
        loader = step_loader(self._dataset, sampler, num_workers=2 if on_gpu else 0)
        with self._run.stopper.training():
            for groups in loader:
                step += 1
                self._step(step, groups)
                request = self._run.stopper.agree(self._engine.ranks.most)
                self._finish_save_if_written()
                if self._run.is_validated(step):
                    self._validate(step)
                is_over = request >= Request.FINISH or self._run.is_finished
                is_kept = self._run.best_step == step
                if step % self._run.arguments.save_steps == 0 or request or is_over or is_kept:
                    self._save(step)
                if is_over:
                    break
                self._publish_step(step)
            if self._saved_step != step:
                self._save(step)
            self._finish_save()
        return step

    def _resume(self, state: State | None) -> int:
        if state is None:
            return 0
        self._saved_step = state.step
        if self._run.is_complete(state):
            logger.info("training was complete at step %d", state.step)
            load_weights(state.folder, self._engine.model)
            return state.step
        is_same = load_state(state.folder, self._engine.model, self._engine.optimizer)
        if not is_same:
            self._run.events.log("warning", "another number of ranks than before: dropout differs")
        self._open_loss, self._logged_step = self._run.read_open_loss(state.folder)
        return state.step

    def _step(self, step: int, groups: list[Group]) -> None:
        arguments = self._run.arguments
        total = self._run.schedule.total_steps
        rate = learning_rate(step - 1, total_steps=total, arguments=arguments)
        numbers = self._engine.step(groups, rate=rate)
        self._check_finite(step, numbers)
        self._open_loss += numbers.loss
        self._counts.add(groups, num_passes=numbers.num_passes)
        if step % arguments.logging_steps == 0 or step == total:
            self._report(step, numbers, rate=rate)

    def _validate(self, step: int) -> None:
        began = time.monotonic()
        layout = self._engine.ranks.layout
        # The ranks of one replica have the same rows.
        copies = layout.world // layout.data
        scoring = Scoring(
            score=self._engine.score,
            sums=lambda numbers: [one / copies for one in self._engine.ranks.sums(numbers)],
            replica=self._engine.ranks.data_rank,
            num_replicas=layout.data,
        )
        self._run.validate(step, scoring)
        self._counts.leave_out(time.monotonic() - began)

    def _publish_step(self, step: int) -> None:
        every = self._run.arguments.megatron.export_steps
        # The last step's is published when all is done.
        if not every or step % every or step == self._run.schedule.total_steps:
            return
        folder = self._publish(step)
        if folder is not None:
            self._run.events.log(
                "info", f"step {step} is published as {EXPORTS_NAME}/{folder.name}"
            )

    def _check_finite(self, step: int, numbers: StepNumbers) -> None:
        is_scaled = self._run.arguments.dtype == "float16"
        # fp16's loss scaling meets infinite gradients on purpose, skips the step and goes on.
        if not math.isfinite(numbers.loss) or not (math.isfinite(numbers.grad_norm) or is_scaled):
            raise NotFiniteError(
                f"step {step}: the loss is {numbers.loss} and the gradient norm {numbers.grad_norm}: "
                "a smaller --learning_rate or another --dtype may help"
            )

    def _report(self, step: int, numbers: StepNumbers, *, rate: float) -> None:
        ranks = self._engine.ranks
        pairs, tokens, truncated, seconds = ranks.sums(self._counts.totals())
        # The ranks of one replica have the same queries.
        copies = ranks.layout.world / ranks.layout.data
        seconds = max(seconds / ranks.layout.world, 1e-9)
        values = {
            "loss": self._open_loss / (step - self._logged_step),
            "learning_rate": rate,
            "grad_norm": numbers.grad_norm,
            "pairs_per_s": pairs / copies / seconds,
            "tokens_per_s": tokens / copies / seconds,
            "truncated_pairs": truncated / copies,
            "memory_bytes": float(ranks.most(memory_bytes(ranks.device))),
            "epoch": step / self._run.schedule.steps_per_epoch,
            **self._moe_losses(step),
        }
        self._open_loss, self._logged_step = 0.0, step
        self._counts = Counts()
        self._run.report(step, values)

    def _moe_losses(self, step: int) -> dict[str, float]:
        config = self._engine.model.config
        if not config.num_moe_experts:
            return {}
        own = self._run.arguments.megatron
        names = _MOE_LOSSES[own.moe_router_load_balancing_type]
        if own.moe_z_loss_coeff is not None:
            names = [*names, "z_loss"]
        found: dict[str, torch.Tensor] = {}
        get_moe_metrics_tracker().report(
            1 / max(1, self._counts.num_passes),
            step,
            # Ranks without such a layer take part in the sums all the same.
            force_initialize=True,
            track_names=names,
            num_layers=config.num_layers,
            moe_layer_freq=config.moe_layer_freq,
            total_loss_dict=found,
        )
        return {f"moe/{name}": float(value) for name, value in found.items()}

    def _save(self, step: int) -> None:
        """Begin to write a resumable state of this step; every rank takes part."""
        self._finish_save()
        run, ranks = self._run, self._engine.ranks
        if ranks.rank == 0:
            (begin_state(run.run_dir, step) / WEIGHTS).mkdir()
        ranks.barrier()
        folder = beside(run.run_dir, step)
        pending = PendingSave(folder, self._engine.model, self._engine.optimizer)
        if ranks.rank == 0:
            run.write_position(folder, open_loss=(self._open_loss, self._logged_step))
        self._pending = _Pending(step, run.best_step, pending)
        self._saved_step = step

    def _finish_save_if_written(self) -> None:
        if self._pending is None:
            return
        is_open = not self._pending.save.is_written
        if not self._engine.ranks.most(int(is_open)):
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait for the state that is being written, and give it its name."""
        if self._pending is None:
            return
        run, ranks = self._run, self._engine.ranks
        step, best, save = self._pending
        save.finish()
        ranks.barrier()
        if ranks.rank == 0:
            commit_state(run.run_dir, step, keep=run.arguments.save_total_limit, best=best)
            run.events.state_saved(step)
        ranks.barrier()
        self._pending = None


class _Pending(NamedTuple):
    """A state that is being written."""

    step: int
    best: int | None
    """The best step when it was begun: the state must be there as long as this one may be gone on from."""
    save: PendingSave
