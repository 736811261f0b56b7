"""What a worker hands to the training program, and what the program says while it runs.

The worker writes `config.json` into the run folder and starts the program on it; the program appends one JSON object
a line to `events.jsonl` beside it and leaves the published form in `export/`. Nothing else passes between them.

Run folder: config.json, events.jsonl, tensorboard/ (the same metrics), tracking/ (where they are sent on), states/step-<N>/
(resumable, complete when it has that name), export/, and exports/step-<N>/ where a run publishes on the way.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from tevatron.core.contracts.jobs import Spec
from tevatron.core.contracts.train import TrainArguments, check_validation
from tevatron.core.process import ATTEMPT_VARIABLE as ATTEMPT_VARIABLE

CONFIG_NAME = "config.json"
EVENTS_NAME = "events.jsonl"
STATES_NAME = "states"
EXPORT_NAME = "export"
EXPORTS_NAME = "exports"
"""Checkpoints published on the way, `step-<N>` each."""
TENSORBOARD_NAME = "tensorboard"
"""Event files of TensorBoard, one an attempt."""
TRACKING_NAME = "tracking"
"""`<tracker>.id` says which run of the tracker it is; W&B's own files lie beside it."""
CANCEL_NAME = "cancel"
"""A file of this name in the run folder turns SIGTERM from 'save and exit' into 'exit at once'."""
SAVE_NAME = "save"
"""A file of this name asks the training for a state after the step that it is at; the program removes it."""
FINISH_NAME = "finish"
"""A file of this name makes the step that the training is at its last one: it is published; the program removes it."""


class TrainRun(Spec):
    """Input of `python -m tevatron.reranker.driver.train config.json`, or of `tevatron.megatron.driver.train`."""

    backend: Literal["hf", "megatron"] = "hf"
    """Which of the training backends the run is for."""
    model_name_or_path: str
    """Folder in Hugging Face's layout, or a hub id on the command line."""
    dataset_path: str
    """Training JSONL, plain, gz or zst."""
    dataset_name: str | None = None
    """What people call the training data; the file's name when unset."""
    validation_path: str | None = None
    """Held-out rows in the same form, scored every --eval_steps steps."""
    output_dir: Path
    """The run folder."""
    base_model: str
    """What the contract says the checkpoint was made from: id or name, for people."""
    resume: bool = True
    """Go on from the newest saved state where there is one."""
    num_processes: int | None = None
    """Ranks, for people; unset on a command line, where torchrun knows."""
    arguments: TrainArguments
    hf_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Other names of transformers' TrainingArguments, given on the command line."""

    @model_validator(mode="after")
    def _validation_has_steps(self) -> Self:
        check_validation(
            self.arguments, is_given=self.validation_path is not None, name="validation_path"
        )
        return self


class ExportRun(Spec):
    """Input of `python -m tevatron.trainer.program.export config.json`."""

    run_dir: Path
    """Run folder of the training job."""
    output_dir: Path
    """Run folder of the export job; its `export/` is made."""
    step: int | None = None
    dtype: str | None = None
    form: str = "merged"


class RunEventType(StrEnum):
    """Types of the lines in events.jsonl."""

    PHASE = "phase"
    """data: phase (contracts.jobs.Phase)."""
    PROGRESS = "progress"
    """data: done, total, unit."""
    METRICS = "metrics"
    """data: step, loss, learning_rate, grad_norm, pairs_per_s, tokens_per_s, memory_bytes, ...; or step, eval_loss, eval_ndcg@10."""
    LOG = "log"
    """data: level, message."""
    STATE_SAVED = "state_saved"
    """data: step."""
    EXPORTED = "exported"
    """data: step; `export/` is whole."""
    STOPPED = "stopped"
    """data: step or null; the program ended because it was asked to, with this state saved."""
    FAILED = "failed"
    """data: reason (contracts.jobs.FailReason), phase, message."""


class RunEvent(BaseModel):
    """One line of events.jsonl; `time` is seconds since the epoch."""

    model_config = ConfigDict(extra="forbid")

    time: float
    type: RunEventType
    data: dict[str, JsonValue]


def log_name(attempt: int) -> str:
    """Return the name of an attempt's log in the run folder; `GET /v1/jobs/{id}/log` reads it."""
    return f"attempt-{attempt}.log"
