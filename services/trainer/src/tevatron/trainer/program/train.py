"""One training run from start to end, on every rank: check, load, train, publish.

Knows the order of the phases and who does what in them; the backend knows how to train.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tevatron.core.contracts.jobs import Phase
from tevatron.core.contracts.run import CONFIG_NAME, TrainRun
from tevatron.core.errors import ConfigError
from tevatron.trainer.program.backends.hf.arguments import (
    check_arguments,
    set_length,
    training_arguments,
)
from tevatron.trainer.program.backends.hf.backend import HfBackend, load_state
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.exporting import Export
from tevatron.trainer.program.models import (
    BaseModel,
    TrainableModel,
    load_trainable,
    open_base,
)
from tevatron.trainer.program.module import RerankModule
from tevatron.trainer.program.preparing import begin, prepare
from tevatron.trainer.program.settings import RankEnvironment
from tevatron.trainer.program.states import State, find_state


def train(config: TrainRun, environment: RankEnvironment, events: EventWriter) -> None:
    """Run the whole training; ends early, with its state saved, when asked to stop."""
    stopper = begin(config, events)
    arguments = config.arguments
    check_arguments(arguments, num_ranks=environment.world_size)
    base = open_base(config.model_name_or_path, arguments)
    hf_arguments = training_arguments(
        arguments,
        config.output_dir,
        num_ranks=environment.world_size,
        others=config.hf_arguments,
    )
    device = hf_arguments.device
    run, dataset, state = prepare(
        config,
        base,
        num_replicas=environment.world_size,
        barrier=_barrier,
        events=events,
        stopper=stopper,
    )
    set_length(hf_arguments, arguments, total_steps=run.schedule.total_steps)
    events.phase(Phase.LOADING)
    trained = load_trainable(base, arguments, device=device)
    events.phase(Phase.TRAINING)
    backend = HfBackend(run, hf_arguments)
    step = backend.train(base, trained, dataset, state=state)
    if stopper.stops:
        events.stopped(step)
        return
    _leave_ranks()
    if environment.rank == 0:
        events.phase(Phase.EXPORTING)
        published = run.best_step or step
        if backend.is_sharded or published != step:
            trained = load_whole(base, config, find_state(config.output_dir, published), device)
        _export(config, base, trained, run.dataset_sha256, device, step=published)
        events.exported(published)


def train_with(config: TrainRun, environment: RankEnvironment, events: EventWriter) -> None:
    """Run the training with the backend that the config names."""
    if config.backend == "hf":
        train(config, environment, events)
        return
    try:
        # Megatron is of its own environment, which the hf backend does not need.
        from tevatron.trainer.program.backends.megatron.run import train as train_megatron
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("tevatron"):
            raise
        raise ConfigError(
            f"backend 'megatron' needs the packages of requirements/megatron.txt: {error}"
        ) from error
    train_megatron(config, environment, events)


def load_whole(
    base: BaseModel, config: TrainRun, state: State, device: torch.device
) -> TrainableModel:
    """Load the base model and put a state's weights into it, on one rank."""
    trained = load_trainable(base, config.arguments, device=device)
    load_state(RerankModule(trained.model, base.head, packing=True, pad_to_multiple_of=1), state)
    return trained


def _export(
    config: TrainRun,
    base: BaseModel,
    trained: TrainableModel,
    dataset_sha256: str,
    device: torch.device,
    *,
    step: int,
) -> None:
    arguments = config.arguments
    Export(
        output_dir=config.output_dir,
        run=config,
        base=base,
        dataset_sha256=dataset_sha256,
        dtype=arguments.export_dtype or arguments.dtype,
        device=device,
        adapter_only=arguments.export_form == "adapter",
    ).publish(trained, step=step)


def _barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _leave_ranks() -> None:
    # The export is rank 0's alone; the others must not wait for it in a collective that times out.
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def write_config(config: TrainRun) -> None:
    """Keep the run's config beside it, so that a state of it can be exported later."""
    path = config.output_dir / CONFIG_NAME
    config.output_dir.mkdir(parents=True, exist_ok=True)
    path.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_config(path: Path) -> TrainRun:
    """Read a run's config; a broken one is a `ConfigError`."""
    try:
        return TrainRun.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not the config of a training run: {error}") from error
