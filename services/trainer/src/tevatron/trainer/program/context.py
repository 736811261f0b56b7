"""What a training run carries around: its folder, arguments, schedule, events and the request to stop."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.errors import ConfigError
from tevatron.trainer.program.data.sampling import Sampling
from tevatron.trainer.program.data.schedule import Schedule
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.states import State
from tevatron.trainer.program.stopping import Stopper

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

    def write_position(self, folder: Path, *, open_loss: tuple[float, int]) -> None:
        """Write what the state belongs to, and the loss that is summed up but not logged."""
        content = {"fixed": self._fixed(), "open_loss": list(open_loss)}
        (folder / POSITION_FILE).write_text(json.dumps(content), encoding="utf-8")

    def read_open_loss(self, folder: Path) -> tuple[float, int]:
        """Return the sum and the step of the last log before the state."""
        loss, step = json.loads((folder / POSITION_FILE).read_text(encoding="utf-8"))["open_loss"]
        return float(loss), int(step)

    def check_state(self, state: State) -> None:
        """Raise `ConfigError` where the state is of another run: other data, other arguments."""
        saved = json.loads((state.folder / POSITION_FILE).read_text(encoding="utf-8"))["fixed"]
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
        return values
