"""What every backend does before a model loads: SIGTERM taken over, data checked and opened, the state to go on from found.

Knows no model weights and no parallel layout: the backend says how many replicas share the queries, and how its ranks
wait for one another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from transformers.utils import logging as transformers_logging

from tevatron.core.contracts.jobs import Phase
from tevatron.core.contracts.run import TrainRun
from tevatron.core.contracts.train import TrainArguments
from tevatron.trainer.program.best import Best
from tevatron.trainer.program.context import Run
from tevatron.trainer.program.data.groups import GroupDataset
from tevatron.trainer.program.data.rows import Demands, RowFile, prepare_rows
from tevatron.trainer.program.data.sampling import Sampling
from tevatron.trainer.program.data.schedule import Schedule
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.losses import get_loss
from tevatron.trainer.program.models import BaseModel
from tevatron.trainer.program.states import State, newest_state
from tevatron.trainer.program.stopping import Stopper
from tevatron.trainer.program.tensorboard import TensorBoard
from tevatron.trainer.program.tracking import check_trackers, open_trackers
from tevatron.trainer.program.validation import VALIDATION_NAME, Validation

logger = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """A run that can be trained once its model is there."""

    run: Run
    dataset: GroupDataset
    state: State | None
    """The state to go on from."""


def begin(config: TrainRun, events: EventWriter) -> Stopper:
    """Take over SIGTERM and say that the run prepares."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    stopper = Stopper(config.output_dir, rank=events.rank)
    stopper.install(lambda: events.stopped(None))
    events.phase(Phase.PREPARING)
    check_trackers(config.arguments)
    return stopper


def prepare(
    config: TrainRun,
    base: BaseModel,
    *,
    num_replicas: int,
    barrier: Callable[[], None],
    events: EventWriter,
    stopper: Stopper,
) -> Prepared:
    """Check the data on rank 0 while the others wait, and work out the schedule; every rank must call it."""
    rows, held_out = _rows(config, base, is_main=events.rank == 0, barrier=barrier)
    validation = Validation(held_out, base.renderer, config.arguments) if held_out else None
    run = _run(
        config,
        rows,
        validation,
        num_replicas=num_replicas,
        events=events,
        stopper=stopper,
    )
    state = newest_state(config.output_dir) if config.resume else None
    if state is not None:
        run = run.go_on_from(state)
        logger.info("going on from the state of step %d", state.step)
    if events.rank == 0:
        events.readers.append(
            TensorBoard(config.output_dir, step=0 if state is None else state.step)
        )
        events.readers += open_trackers(config, events)
    dataset = GroupDataset(
        rows,
        renderer=base.renderer,
        sampling=run.sampling,
        needs_teacher=get_loss(config.arguments.loss).needs_teacher,
    )
    return Prepared(run, dataset, state)


def _rows(
    config: TrainRun, base: BaseModel, *, is_main: bool, barrier: Callable[[], None]
) -> tuple[RowFile, RowFile | None]:
    """Return the checked rows to train on, and those that are held out."""
    folder, held_out = config.output_dir, config.output_dir / VALIDATION_NAME
    if is_main:
        _prepare_rows(config.dataset_path, folder, config.arguments, base, what="training")
        if config.validation_path is not None:
            _prepare_rows(config.validation_path, held_out, config.arguments, base, what="held-out")
    barrier()
    return RowFile(folder), None if config.validation_path is None else RowFile(held_out)


def _prepare_rows(
    path: str, folder: Path, arguments: TrainArguments, base: BaseModel, *, what: str
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    demands = Demands(
        group_size=arguments.train_group_size,
        needs_teacher=get_loss(arguments.loss).needs_teacher,
    )
    rows = prepare_rows(Path(path), folder, renderer=base.renderer, demands=demands)
    logger.info("%d %s rows are whole", len(rows), what)


def _run(
    config: TrainRun,
    rows: RowFile,
    validation: Validation | None,
    *,
    num_replicas: int,
    events: EventWriter,
    stopper: Stopper,
) -> Run:
    arguments = config.arguments
    return Run(
        run_dir=config.output_dir,
        arguments=arguments,
        schedule=Schedule(
            num_rows=len(rows),
            micro_batch=arguments.per_device_train_batch_size,
            num_micro_batches=arguments.gradient_accumulation_steps,
            num_ranks=num_replicas,
            num_epochs=arguments.num_train_epochs,
            max_steps=arguments.max_steps,
        ),
        sampling=Sampling(
            seed=arguments.seed,
            group_size=arguments.train_group_size,
            first_positive=arguments.positive_passage_no_shuffle,
            first_negatives=arguments.negative_passage_no_shuffle,
        ),
        dataset_sha256=rows.summary.dataset_sha256,
        validation=validation,
        best=Best(),
        events=events,
        stopper=stopper,
    )
