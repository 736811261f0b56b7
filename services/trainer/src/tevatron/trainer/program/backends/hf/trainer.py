"""A transformers Trainer whose micro batches are packed rows and whose loss is weighted by groups.

Owns what differs from the stock Trainer: the loader, the step, validation, the states and the log. The loop, the optimizer, the
schedule, DDP, FSDP and tracking are transformers' own.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerControl, TrainerState

from tevatron.core.contracts.jobs import Phase
from tevatron.core.nn.sending import sent
from tevatron.core.packing import pack
from tevatron.trainer.program.backends.hf import snapshot
from tevatron.trainer.program.context import Run
from tevatron.trainer.program.counts import Counts, memory_bytes
from tevatron.trainer.program.data.groups import (
    Group,
    GroupDataset,
    MicroBatchSampler,
    make_loader,
)
from tevatron.trainer.program.failures import NotFiniteError
from tevatron.trainer.program.losses import Temperatures, get_loss
from tevatron.trainer.program.module import RerankModule
from tevatron.trainer.program.states import begin_state, beside, commit_state
from tevatron.trainer.program.stopping import Request
from tevatron.trainer.program.validation import Scoring, pack_prompts

TRAINER_FILE = "trainer_state.json"


class RerankTrainer(Trainer):
    """Trains a `RerankModule` on the groups of a schedule."""

    def __init__(
        self, module: RerankModule, run: Run, dataset: GroupDataset, arguments: TrainingArguments
    ) -> None:
        self.run = run
        self._loss = get_loss(run.arguments.loss)
        self._temperatures = Temperatures(
            student=run.arguments.student_temp, teacher=run.arguments.teacher_temp
        )
        self._counts = Counts()
        self._resumed_loss: tuple[float, int] | None = None
        super().__init__(
            model=module, args=arguments, train_dataset=dataset, callbacks=[_StepCallback(self)]
        )
        self.remove_callback(PrinterCallback)

    # The data

    def get_train_dataloader(self) -> DataLoader[Group]:
        """Return this rank's micro batches, which need no sharding by accelerate."""
        assert isinstance(self.train_dataset, GroupDataset)
        sampler = MicroBatchSampler(
            self.run.schedule,
            self.run.sampling,
            rank=self.args.process_index,
            step=lambda: self.state.global_step,
        )
        return make_loader(
            self.train_dataset, sampler, num_workers=self.args.dataloader_num_workers
        )

    # The step

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: object = None
    ) -> Tensor:
        """Run the micro batch in one or more packed passes; return its share of the step's mean loss."""
        model.train()
        groups: list[Group] = inputs["groups"]
        passes = self._passes(groups)
        total = torch.zeros((), device=self.args.device)
        for place, chosen in enumerate(passes):
            is_last = place == len(passes) - 1
            with contextlib.nullcontext() if is_last else self._without_sync(model):
                loss = self._pass_loss(model, chosen)
                self.accelerator.backward(loss)
            total += loss.detach()
        if not torch.isfinite(total):
            raise NotFiniteError(
                f"the loss of step {self.state.global_step + 1} is {float(total)}: "
                "a smaller --learning_rate or another --dtype may help"
            )
        self._counts.add(groups, num_passes=len(passes))
        return total

    def _passes(self, groups: list[Group]) -> list[list[Group]]:
        if not groups:
            passes: list[list[Group]] = []
        elif self.run.arguments.packing:
            lengths = [sum(len(prompt) for prompt in group.prompts) for group in groups]
            bins = pack(lengths, max_tokens=self.run.arguments.packing_max_tokens)
            passes = [[groups[index] for index in indices] for indices in bins]
        else:
            passes = [groups]
        return passes + [[]] * (self._num_passes(len(passes)) - len(passes))

    def _num_passes(self, own: int) -> int:
        """Return how many passes to run: as many as the other ranks where they meet in each, or in the last."""
        if self.args.world_size == 1:
            return own
        most = own
        if self.is_fsdp_enabled:
            numbers = torch.tensor(own, device=self.args.device)
            torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX)
            most = int(numbers)
        return max(most, 1)

    def _without_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        # FSDP without sync would keep whole gradients; it adds up sharded ones by itself.
        if self.args.world_size == 1 or self.is_fsdp_enabled:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = self.accelerator.no_sync(model)
        return context

    def _pass_loss(self, model: nn.Module, groups: list[Group]) -> Tensor:
        if not groups:
            # A rank without groups still takes part where gradients are reduced.
            idle: Tensor = model([[0]]).sum() * 0.0
            return idle
        prompts = [prompt for group in groups for prompt in group.prompts]
        scores_NG: Tensor = model(prompts).view(len(groups), -1)
        teacher_NG = None
        if groups[0].teacher is not None:
            teacher_NG = sent(torch.tensor([group.teacher for group in groups]), scores_NG.device)
        losses_N: Tensor = self._loss.function(scores_NG, teacher_NG, self._temperatures)
        # DDP and FSDP take the mean over ranks: times their number, it is the sum over all groups of the step.
        weight = self.args.world_size / groups[0].num_groups
        loss: Tensor = losses_N.sum() * weight
        return loss

    # Validation

    def evaluate(
        self,
        eval_dataset: object = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Score the held-out rows, and save and end where that makes it so; every rank takes part."""
        began = time.monotonic()
        step = self.state.global_step
        scoring = Scoring(
            score=self._score,
            sums=self._sums,
            replica=self.args.process_index,
            num_replicas=self.args.world_size,
        )
        values = self.run.validate(step, scoring)
        self.log(values)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, values
        )
        if self.run.best_step == step:
            self.control.should_save = True
        if self.run.is_finished:
            self.control.should_save = self.control.should_training_stop = True
        self._counts.leave_out(time.monotonic() - began)
        return values

    def _score(self, prompts: list[list[int]]) -> list[float]:
        """Return one score a prompt; no gradient, no dropout."""
        model = self.model_wrapped
        passes = pack_prompts(prompts, self.run.arguments)
        scores = [0.0] * len(prompts)
        model.train(False)
        with torch.no_grad():
            for indices in passes:
                found: Tensor = model([prompts[index] for index in indices])
                for index, score in zip(indices, found.tolist(), strict=True):
                    scores[index] = score
            for _ in range(self._num_passes(len(passes)) - len(passes)):
                model([[0]])
        model.train()
        return scores

    def _sums(self, numbers: list[float]) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64, device=self.args.device)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(total)
        return [float(number) for number in total]

    # States

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Write a resumable state of this step; every rank takes part."""
        run_dir, step = self.run.run_dir, self.state.global_step
        is_main = self.args.process_index == 0
        loss = self._open_loss()
        self.run.events.phase(Phase.SAVING)
        if is_main:
            begin_state(run_dir, step)
        self.barrier()
        folder = beside(run_dir, step)
        self.write_snapshot(folder)
        if is_main:
            self.state.save_to_json(str(folder / TRAINER_FILE))
            self.run.write_position(folder, open_loss=loss)
        self.barrier()
        if is_main:
            commit_state(
                run_dir, step, keep=self.run.arguments.save_total_limit, best=self.run.best_step
            )
            self.run.events.state_saved(step)
        self.barrier()
        self.run.events.phase(Phase.TRAINING)

    def write_snapshot(self, folder: Path) -> None:
        """Write weights, optimizer, scheduler and random state into the folder."""
        sharded = self.is_fsdp_enabled
        is_main = self.args.process_index == 0
        module = self._saved_module()
        if is_main or sharded:
            weights = snapshot.trainable_weights(module, sharded=sharded)
            optimizer = snapshot.optimizer_state(module, self._optimizer(), sharded=sharded)
        if is_main:
            snapshot.save_weights(weights, folder)
            torch.save(optimizer, folder / snapshot.OPTIMIZER_FILE)
            torch.save(self._scheduler().state_dict(), folder / snapshot.SCHEDULER_FILE)
            self._save_scaler(str(folder))
        snapshot.save_random_state(folder, rank=self.args.process_index)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        snapshot.load_trainable_weights(
            self._saved_module(),
            Path(resume_from_checkpoint) / snapshot.WEIGHTS_FILE,
            sharded=self.is_fsdp_enabled,
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        snapshot.load_optimizer_state(
            self._saved_module(),
            self._optimizer(),
            folder / snapshot.OPTIMIZER_FILE,
            sharded=self.is_fsdp_enabled,
        )
        state = torch.load(folder / snapshot.SCHEDULER_FILE, weights_only=True)
        self._scheduler().load_state_dict(state)
        self._resumed_loss = self.run.read_open_loss(folder)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        rank = self.args.process_index
        if not snapshot.load_random_state(Path(checkpoint), rank=rank):
            self.run.events.log("warning", "another number of ranks than before: dropout differs")

    def _saved_module(self) -> nn.Module:
        module = self.accelerator.unwrap_model(self.model)
        assert isinstance(module, nn.Module)
        return module

    def _optimizer(self) -> torch.optim.Optimizer:
        assert isinstance(self.optimizer, torch.optim.Optimizer)
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        assert isinstance(inner, torch.optim.Optimizer)
        return inner

    def _scheduler(self) -> torch.optim.lr_scheduler.LRScheduler:
        assert isinstance(self.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
        return self.lr_scheduler

    def barrier(self) -> None:
        """Wait for the other ranks."""
        self.accelerator.wait_for_everyone()

    # The loss that is summed up but not logged yet belongs to the state, or a resumed run would log another mean.

    def _open_loss(self) -> tuple[float, int]:
        mean = self.accelerator.reduce(self._tr_loss.detach().clone(), reduction="mean")
        return float(mean), self._globalstep_last_logged

    def restore_open_loss(self) -> None:
        """Put back what was summed up before the state was saved."""
        if self._resumed_loss is not None:
            loss, step = self._resumed_loss
            self._tr_loss += loss
            self._globalstep_last_logged = step
            self._resumed_loss = None

    # The log

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Report a step's numbers, summed over the ranks, as events and to the trackers."""
        if "loss" in logs:
            logs = {**logs, **self._speed()}
            self._check_finite(logs)
        super().log(logs, start_time)
        if "loss" in logs:
            step = self.state.global_step
            self.run.report(step, {**logs, "epoch": float(self.state.epoch or 0.0)})

    def _speed(self) -> dict[str, float]:
        counts = torch.tensor(self._counts.totals(), dtype=torch.float64, device=self.args.device)
        if self.args.device.type == "mps":
            counts = counts.float()
        pairs, tokens, truncated, seconds = self.accelerator.reduce(
            counts, reduction="sum"
        ).tolist()
        seconds = max(seconds / self.args.world_size, 1e-9)
        self._counts = Counts()
        return {
            "pairs_per_s": pairs / seconds,
            "tokens_per_s": tokens / seconds,
            "truncated_pairs": truncated,
            "memory_bytes": float(memory_bytes(self.args.device)),
        }

    def _check_finite(self, logs: dict[str, float]) -> None:
        norm = logs.get("grad_norm", 0.0)
        # fp16's loss scaling meets infinite gradients on purpose, skips the step and goes on.
        if not torch.isfinite(torch.tensor(norm)) and not self.args.fp16:
            raise NotFiniteError(
                f"the gradient norm of step {self.state.global_step} is {norm}: "
                "a smaller --learning_rate or --max_grad_norm may help"
            )


class _StepCallback(TrainerCallback):
    """Logs the first step and the last, validates, and does what any rank was asked for; all ranks decide the same."""

    def __init__(self, trainer: RerankTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._trainer.restore_open_loss()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        if state.global_step in (1, state.max_steps):
            # A run shorter than logging_steps would say nothing of its loss.
            control.should_log = True
        run = self._trainer.run
        request = run.stopper.agree(partial(_most, args))
        if request:
            control.should_save = True
        if request >= Request.FINISH:
            control.should_training_stop = True
        control.should_evaluate = run.is_validated(state.global_step)


def _most(args: TrainingArguments, number: int) -> int:
    """Return the largest of all ranks' numbers."""
    largest = torch.tensor(number, device=args.device)
    if args.world_size > 1:
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return int(largest)
