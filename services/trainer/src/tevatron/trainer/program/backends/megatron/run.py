"""One training run of the megatron backend from start to end, on every rank: check, load, train, publish."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from tevatron.core.contracts.jobs import Phase
from tevatron.core.contracts.run import TrainRun
from tevatron.core.contracts.train import Head, TrainArguments
from tevatron.core.errors import ConfigError
from tevatron.core.model_shape import ModelShape
from tevatron.core.nn.forward import YesNoHead
from tevatron.core.nn.loading import load_config
from tevatron.trainer.program.backends.hf.context import Run
from tevatron.trainer.program.backends.megatron.engine import Engine
from tevatron.trainer.program.backends.megatron.loop import Loop
from tevatron.trainer.program.backends.megatron.model import load_model
from tevatron.trainer.program.backends.megatron.optimizer import make_optimizer
from tevatron.trainer.program.backends.megatron.parallel import (
    Ranks,
    check_layout,
    join_ranks,
    leave_ranks,
)
from tevatron.trainer.program.backends.megatron.scoring import check_logits
from tevatron.trainer.program.backends.megatron.weights import write_weights
from tevatron.trainer.program.data.groups import GroupDataset
from tevatron.trainer.program.data.rows import Demands, RowFile, prepare_rows
from tevatron.trainer.program.data.sampling import Sampling
from tevatron.trainer.program.data.schedule import Schedule
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.exporting import Export
from tevatron.trainer.program.losses import get_loss
from tevatron.trainer.program.models import BaseModel, open_base
from tevatron.trainer.program.settings import RankEnvironment
from tevatron.trainer.program.states import newest_state
from tevatron.trainer.program.stopping import Stopper

logger = logging.getLogger(__name__)


def train(config: TrainRun, environment: RankEnvironment, events: EventWriter) -> None:
    """Run the whole training; ends early, with its state saved, when asked to stop."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    stopper = Stopper(config.output_dir)
    stopper.install(lambda: events.stopped(None))
    events.phase(Phase.PREPARING)
    arguments = config.arguments
    check_arguments(config)
    base = open_base(config.model_name_or_path, arguments)
    shape = ModelShape.read(base.folder)
    layout = check_layout(arguments.megatron, shape, world=environment.world_size)
    ranks = join_ranks(layout, environment, seed=arguments.seed)
    rows = _prepare(config, base, ranks)
    run = _make_run(config, rows, ranks, events, stopper)
    state = newest_state(config.output_dir) if config.resume else None
    if state is not None:
        run.check_state(state)
        logger.info("going on from the state of step %d", state.step)
    events.phase(Phase.LOADING)
    engine = load_engine(base, arguments, ranks)
    events.phase(Phase.TRAINING)
    step = Loop(engine, run, _dataset(run, rows, base)).train(state)
    if stopper.requested:
        events.stopped(step)
        leave_ranks()
        return
    events.phase(Phase.EXPORTING)
    export = Export(
        output_dir=config.output_dir,
        base=base,
        base_name=config.base_model,
        arguments=arguments,
        dataset_sha256=rows.summary.dataset_sha256,
        dtype=arguments.export_dtype or arguments.dtype,
        device=torch.device("cuda" if ranks.device.type == "cuda" else "cpu"),
    )
    written, scores = write_export(export, engine)
    # What is loaded back needs the memory.
    del engine
    finish_export(export, written, scores)
    events.exported(step)


def check_arguments(config: TrainRun) -> None:
    """Raise `ConfigError` for what this backend does not do, naming the flag."""
    arguments = config.arguments
    if config.hf_arguments:
        names = ", ".join(f"--{name}" for name in sorted(config.hf_arguments))
        raise ConfigError(f"{names}: not honoured by the megatron backend")
    if arguments.head is not Head.YES_NO:
        raise ConfigError(
            f"head '{arguments.head}': the megatron backend trains 'yes_no' heads; use the hf backend"
        )
    if arguments.fsdp:
        raise ConfigError(
            f"--fsdp {arguments.fsdp} is a flag of the hf backend; here the optimizer is sharded, and "
            "--tensor_model_parallel_size or --pipeline_model_parallel_size cut the weights"
        )
    if arguments.attn_implementation:
        raise ConfigError("--attn_implementation is a flag of the hf backend")
    if arguments.min_lr > arguments.learning_rate:
        raise ConfigError(
            f"--min_lr {arguments.min_lr:g} is above --learning_rate {arguments.learning_rate:g}"
        )
    if arguments.min_lr and arguments.lr_scheduler_type != "cosine":
        raise ConfigError(
            f"--min_lr is honoured with --lr_scheduler_type cosine, not with '{arguments.lr_scheduler_type}'"
        )
    if arguments.dtype == "float16" and not torch.cuda.is_available():
        raise ConfigError("--dtype float16 needs a GPU; on a CPU use bfloat16 or float32")


def load_engine(base: BaseModel, arguments: TrainArguments, ranks: Ranks) -> Engine:
    """Load the base model into this layout, with an optimizer for what is trained."""
    config = load_config(base.folder)
    check_logits(config)
    assert isinstance(base.head, YesNoHead), "check_arguments refuses other heads"
    model = load_model(base.folder, arguments, ranks)
    softcap: float | None = getattr(config.get_text_config(), "final_logit_softcapping", None)
    return Engine.of(
        model,
        make_optimizer(model, arguments),
        ranks,
        arguments=arguments,
        head=base.head,
        softcap=softcap,
    )


def write_export(export: Export, engine: Engine) -> tuple[Path | None, list[float]]:
    """Score the probes and write the weights; all ranks take part, and rank 0 gets the folder."""
    ranks = engine.ranks
    scores = engine.score(export.probe_ids())
    written = export.begin() if ranks.rank == 0 else None
    write_weights(engine.model, ranks, written, base=export.base.folder, dtype=export.dtype)
    leave_ranks()
    return written, scores


def finish_export(export: Export, written: Path | None, scores: list[float]) -> None:
    """Prove and name the folder, on rank 0 alone; the training model must be given up before."""
    if written is None:
        return
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    export.finish(written, scores)


def _prepare(config: TrainRun, base: BaseModel, ranks: Ranks) -> RowFile:
    """Check the data on rank 0 while the others wait, and open it everywhere."""
    if ranks.rank == 0:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        demands = Demands(
            group_size=config.arguments.train_group_size,
            needs_teacher=get_loss(config.arguments.loss).needs_teacher,
        )
        rows = prepare_rows(
            Path(config.dataset_path), config.output_dir, renderer=base.renderer, demands=demands
        )
        logger.info("%d training rows are whole", len(rows))
    ranks.barrier()
    return RowFile(config.output_dir)


def _make_run(
    config: TrainRun, rows: RowFile, ranks: Ranks, events: EventWriter, stopper: Stopper
) -> Run:
    arguments = config.arguments
    return Run(
        run_dir=config.output_dir,
        arguments=arguments,
        schedule=Schedule(
            num_rows=len(rows),
            micro_batch=arguments.per_device_train_batch_size,
            num_micro_batches=arguments.gradient_accumulation_steps,
            num_ranks=ranks.layout.data,
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
        events=events,
        stopper=stopper,
    )


def _dataset(run: Run, rows: RowFile, base: BaseModel) -> GroupDataset:
    return GroupDataset(
        rows,
        renderer=base.renderer,
        sampling=run.sampling,
        needs_teacher=get_loss(run.arguments.loss).needs_teacher,
    )
