"""One training run of the megatron backend from start to end, on every rank: check, load, train, publish."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tevatron.core.contracts.jobs import Phase
from tevatron.core.contracts.run import EXPORTS_NAME, TrainRun
from tevatron.core.contracts.train import TrainArguments, check_megatron
from tevatron.core.errors import ConfigError
from tevatron.core.model_shape import ModelShape
from tevatron.core.nn.forward import YesNoHead
from tevatron.core.nn.loading import load_config
from tevatron.trainer.program.backends.megatron.adapters import peft_model
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
from tevatron.trainer.program.backends.megatron.state import load_weights
from tevatron.trainer.program.backends.megatron.weights import write_weights
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.exporting import Export
from tevatron.trainer.program.models import BaseModel, open_base
from tevatron.trainer.program.preparing import begin, prepare
from tevatron.trainer.program.settings import RankEnvironment
from tevatron.trainer.program.states import find_state


def train(config: TrainRun, environment: RankEnvironment, events: EventWriter) -> None:
    """Run the whole training; ends early, with its state saved, when asked to stop."""
    stopper = begin(config, events)
    arguments = config.arguments
    check_arguments(config)
    base = open_base(config.model_name_or_path, arguments)
    shape = ModelShape.read(base.folder)
    layout = check_layout(arguments.megatron, shape, world=environment.world_size)
    ranks = join_ranks(layout, environment, seed=arguments.seed)
    run, dataset, state = prepare(
        config,
        base,
        num_replicas=layout.data,
        barrier=ranks.barrier,
        events=events,
        stopper=stopper,
    )
    events.phase(Phase.LOADING)
    engine = load_engine(base, arguments, ranks)
    on_gpu = ranks.device.type == "cuda"
    export = Export(
        output_dir=config.output_dir,
        run=config,
        base=base,
        dataset_sha256=run.dataset_sha256,
        dtype=arguments.export_dtype or arguments.dtype,
        device=torch.device("cuda" if on_gpu else "cpu"),
        adapter_only=arguments.export_form == "adapter",
    )
    events.phase(Phase.TRAINING)
    step = Loop(engine, run, dataset, publish=partial(publish_step, export, engine)).train(state)
    if stopper.stops:
        events.stopped(step)
        leave_ranks()
        return
    events.phase(Phase.EXPORTING)
    published = run.best_step or step
    if published != step:
        folder = find_state(run.run_dir, published).folder
        load_weights(folder, engine.model)
    written, scores = write_export(export, engine)
    leave_ranks()
    # What is loaded back needs the memory.
    del engine
    finish_export(export, written, scores, step=published)
    events.exported(published)


def check_arguments(config: TrainRun) -> None:
    """Raise `ConfigError` for what this backend does not do, here or anywhere, naming the flag."""
    arguments = config.arguments
    if config.hf_arguments:
        names = ", ".join(f"--{name}" for name in sorted(config.hf_arguments))
        raise ConfigError(f"{names}: not honoured by the megatron backend")
    check_megatron(arguments)
    if arguments.dtype == "float16" and not torch.cuda.is_available():
        raise ConfigError("--dtype float16 needs a GPU; on a CPU use bfloat16 or float32")


def load_engine(base: BaseModel, arguments: TrainArguments, ranks: Ranks) -> Engine:
    """Load the base model into this layout, with an optimizer for what is trained."""
    config = load_config(base.folder)
    check_logits(config, packing=arguments.packing)
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
    if not export.adapter_only:
        write_weights(engine.model, ranks, written, base=export.base.folder, dtype=export.dtype)
        return written, scores
    adapted = peft_model(
        engine.model, export.base.folder, engine.arguments, is_writer=written is not None
    )
    if written is not None and adapted is not None:
        export.write_adapter(adapted, written)
    return written, scores


def publish_step(export: Export, engine: Engine, step: int) -> Path | None:
    """Publish a checkpoint while the training goes on; every rank must call it, and rank 0 gets its folder."""
    # Proved on the CPU: the GPU is full of what is trained. The others wait for rank 0 in the next step.
    here = replace(
        export,
        output_dir=export.output_dir / EXPORTS_NAME,
        name=f"step-{step}",
        device=torch.device("cpu"),
    )
    written, scores = write_export(here, engine)
    return None if written is None else here.finish(written, scores, step=step)


def finish_export(export: Export, written: Path | None, scores: list[float], *, step: int) -> None:
    """Prove and name the folder, on rank 0 alone; the training model must be given up before."""
    if written is None:
        return
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    export.finish(written, scores, step=step)
