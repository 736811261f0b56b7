"""What a training run carries around: its folder, arguments, schedule, events, best step, and what was asked of it."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from tevatron.core.contracts.jobs import Phase
from tevatron.core.contracts.train import TrainArguments
from tevatron.core.errors import ConfigError
from tevatron.trainer.program.best import Best
from tevatron.trainer.program.data.sampling import Sampling
from tevatron.trainer.program.data.schedule import Schedule
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.states import State, list_states
from tevatron.trainer.program.stopping import Stopper
from tevatron.trainer.program.validation import Scoring, Validation

logger = logging.getLogger(__name__)

POSITION_FILE = "position.json"

_FIXED = (
    "prompt_template",
    "query_prefix",
    "passage_prefix",
    "rerank_max_len",
    "append_eos_token",
    "head",
    "train_group_size",
    "positive_passage_no_shuffle",
    "negative_passage_no_shuffle",
    "seed",
    "loss",
    "teacher_temp",
    "student_temp",
    "use_lora",
    "lora_r",
    "lora_alpha",
    "lora_target_groups",
    "lora_target_modules",
)
"""Arguments that a resumed run must share with the state that it goes on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run, as its parts need it."""

    run_dir: Path
    arguments: TrainArguments
    schedule: Schedule
    sampling: Sampling
    dataset_sha256: str
    validation: Validation | None
    best: Best
    events: EventWriter
    stopper: Stopper

    def report(self, step: int, values: dict[str, float]) -> None:
        """Report the numbers of a step, and how far the run is."""
        numbers: dict[str, float | int] = {"step": step, **values}
        self.events.metrics(numbers)
        self.events.progress(step, self.schedule.total_steps, unit="steps")
        if self.events.rank == 0:
            logger.info(
                "step %d/%d: loss %.4f, learning rate %.3g, %.1f pairs/s",
                step,
                self.schedule.total_steps,
                values["loss"],
                values["learning_rate"],
                values["pairs_per_s"],
            )

    def is_validated(self, step: int) -> bool:
        """Say whether the held-out rows are scored after this step."""
        every = self.arguments.eval_steps
        is_last = step == self.schedule.total_steps or self.stopper.finishes
        return bool(every) and (step % every == 0 or is_last)

    def validate(self, step: int, scoring: Scoring) -> dict[str, float]:
        """Score the held-out rows, report the numbers and note whether they are the best; every rank must call it."""
        assert self.validation is not None, "is_validated says when"
        self.events.phase(Phase.EVALUATING)
        values = self.validation.measure(scoring)
        self.best.take(step, values, metric=self.arguments.metric_for_best_model)
        self.events.metrics({"step": step, **values})
        self.events.phase(Phase.TRAINING)
        if self.events.rank == 0:
            numbers = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
            logger.info("step %d: %s", step, numbers)
        return values

    @property
    def best_step(self) -> int | None:
        """The step whose state is kept and published, None where that is the last one."""
        return self.best.step if self.arguments.load_best_model_at_end else None

    @property
    def is_finished(self) -> bool:
        """Whether no step follows though some are left: it was asked for, or the best was too long ago."""
        patience = self.arguments.early_stopping_patience
        return self.stopper.finishes or 0 < patience <= self.best.num_worse

    def write_position(self, folder: Path, *, open_loss: tuple[float, int]) -> None:
        """Write what the state belongs to, the loss that is summed up but not logged, and the best evaluation so far."""
        content = {
            "fixed": self._fixed(),
            "open_loss": list(open_loss),
            "best": self.best.model_dump(),
            "finished": self.stopper.finishes,
        }
        (folder / POSITION_FILE).write_text(json.dumps(content), encoding="utf-8")

    def read_open_loss(self, folder: Path) -> tuple[float, int]:
        """Return the sum and the step of the last log before the state."""
        loss, step = _read_position(folder)["open_loss"]
        return float(loss), int(step)

    def is_complete(self, state: State) -> bool:
        """Say whether nothing is left to be trained after the state that the run goes on from."""
        was_finished = bool(_read_position(state.folder).get("finished", False))
        return state.step >= self.schedule.total_steps or was_finished or self.is_finished

    def go_on_from(self, state: State) -> Run:
        """Return the run as it was when the state was saved; `ConfigError` where the state is of another one."""
        self.check_state(state)
        best = best_of(state)
        run = replace(self, best=best)
        there = [one.step for one in list_states(self.run_dir)]
        if run.best_step not in (None, *there):
            raise ConfigError(
                f"{state.folder.name} says that step {best.step} is the best so far, whose state is gone; there are: "
                f"{', '.join(map(str, there))}. Use another --output_dir, or --resume false to begin again"
            )
        return run

    def check_state(self, state: State) -> None:
        """Raise `ConfigError` where the state is of another run: other data, other arguments."""
        saved = _read_position(state.folder)["fixed"]
        for name, value in self._fixed().items():
            if saved.get(name) != value:
                raise ConfigError(
                    f"{state.folder.name} of this output folder was saved with {name} {saved.get(name)!r}, this run has "
                    f"{value!r}; use another --output_dir, or --resume false to begin again"
                )

    def _fixed(self) -> dict[str, JsonValue]:
        values: dict[str, JsonValue] = self.arguments.model_dump(mode="json", include=set(_FIXED))
        values["groups_per_step"] = self.schedule.groups_per_step
        values["dataset_sha256"] = self.dataset_sha256
        if self.validation is not None:
            # Numbers of other rows, or of another kind, cannot be compared with the best so far.
            values["validation_sha256"] = self.validation.rows.summary.dataset_sha256
            values["metric_for_best_model"] = self.arguments.metric_for_best_model
        return values


def best_of(state: State) -> Best:
    """Return the best evaluation that the run knew of when the state was saved."""
    return Best.model_validate(_read_position(state.folder).get("best", {}))


def _read_position(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / POSITION_FILE).read_text(encoding="utf-8"))
    return content
