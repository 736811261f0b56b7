"""What a claimed train or export job does: look for mistakes, launch, watch, publish.

The order makes a retry cheap: an attempt that finds the whole export of an earlier one only publishes it. Never
imports torch: the ranks do, in processes of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel

from tevatron.core.contracts.jobs import ExportJob, FailReason, Phase, TrainJob
from tevatron.core.contracts.run import CONFIG_NAME, ExportRun, TrainRun
from tevatron.core.errors import ConfigError, JobError
from tevatron.core.hub import model_folder
from tevatron.core.model_shape import ModelShape
from tevatron.core.settings import Settings
from tevatron.core.store.models import Model
from tevatron.core.store.registered import DatasetRepository, ModelRepository
from tevatron.core.worker.runner import AttemptLostError, Finished, JobContext
from tevatron.trainer.checks import check_dataset, check_model
from tevatron.trainer.launchers import (
    ChooseLauncher,
    ClusterUnreachableError,
    Environment,
    Handle,
    Launch,
    Launcher,
)
from tevatron.trainer.publish import has_output, publish
from tevatron.trainer.run_folder import RunFolder
from tevatron.trainer.watch import EventTail, Seen, catch_up, recall, watch

TRAIN_MODULE = "tevatron.reranker.driver.train"
MEGATRON_MODULE = "tevatron.megatron.driver.train"
EXPORT_MODULE = "tevatron.trainer.program.export"
RUNS = "runs"
"""Folder of the run folders below TEVATRON_DATA."""


class Tasks:
    """The trainer's handlers, with the launchers that they use."""

    def __init__(
        self,
        choose: ChooseLauncher,
        *,
        train_module: str = TRAIN_MODULE,
        megatron_module: str = MEGATRON_MODULE,
        export_module: str = EXPORT_MODULE,
    ) -> None:
        self._choose = choose
        self._train_modules = {"hf": train_module, "megatron": megatron_module}
        self._export_module = export_module

    def train(self, ctx: JobContext, spec: TrainJob) -> Finished:
        """Train and publish one checkpoint."""
        run = run_folder(ctx.settings, ctx.claim.job_id)
        with _launching():
            launcher = self._choose(spec.launcher)
            went_on = _go_on(ctx, launcher, run)
            if not went_on and not has_output(ctx.settings, run, ctx.claim.job_id):
                ctx.phase(Phase.PREPARING)
                launcher.check(num_processes=spec.num_processes, num_nodes=spec.num_nodes)
                config = _train_run(ctx, spec, run)
                launch = _launch(
                    ctx,
                    run,
                    module=self._train_modules[spec.backend],
                    num_processes=spec.num_processes,
                    num_nodes=spec.num_nodes,
                    environment=spec.backend,
                    trackers=spec.arguments.trackers,
                )
                _run(ctx, launcher, launch, run, config)
        return publish(ctx, run)

    def export(self, ctx: JobContext, spec: ExportJob) -> Finished:
        """Publish another checkpoint from a saved state."""
        run = run_folder(ctx.settings, ctx.claim.job_id)
        with _launching():
            launcher = self._choose(spec.launcher)
            went_on = _go_on(ctx, launcher, run)
            if not went_on and not has_output(ctx.settings, run, ctx.claim.job_id):
                ctx.phase(Phase.PREPARING)
                config = _export_run(ctx, spec, run)
                launch = _launch(
                    ctx,
                    run,
                    module=self._export_module,
                    num_processes=1,
                    num_nodes=1,
                    environment=_backend_of(config),
                )
                _run(ctx, launcher, launch, run, config)
        return publish(ctx, run, to=spec.to)


def _launch(
    ctx: JobContext,
    run: RunFolder,
    *,
    module: str,
    num_processes: int,
    num_nodes: int | None,
    environment: Environment,
    trackers: Sequence[str] = (),
) -> Launch:
    claim = ctx.claim
    return Launch(
        module=module,
        config_path=run.config,
        run_folder=run.path,
        log_path=run.log(claim.attempt),
        marker=f"{claim.job_id}:{claim.attempt}",
        num_processes=num_processes,
        num_nodes=num_nodes,
        environment=environment,
        trackers=trackers,
    )


def _run(
    ctx: JobContext, launcher: Launcher, launch: Launch, run: RunFolder, config: BaseModel
) -> None:
    """Start an attempt and watch it to its end."""
    ctx.check()
    run.prepare(config)
    tail = EventTail(run.events)
    catch_up(ctx, tail)
    watch(ctx, launcher.start(launch), tail, run=run, seen=Seen())


def _go_on(ctx: JobContext, launcher: Launcher, run: RunFolder) -> bool:
    """Watch the attempt that outlived its worker to its end; False where there is none."""
    handle: Handle | None = launcher.adopt(ctx.claim.job_id, run_folder=run.path)
    if handle is None:
        return False
    run.share_log(ctx.claim.attempt)
    tail = EventTail(run.events)
    seen = recall(ctx, tail)
    ctx.log("info", "this worker goes on watching what another one launched")
    watch(ctx, handle, tail, run=run, seen=seen)
    return True


@contextmanager
def _launching() -> Iterator[None]:
    """Say what a launcher's refusal or silence means for the job."""
    try:
        yield
    except ClusterUnreachableError as error:
        raise AttemptLostError(str(error)) from error
    except ConfigError as error:
        raise _config_error(str(error)) from error


def _backend_of(config: ExportRun) -> Environment:
    """Return the backend that trained what is exported."""
    try:
        trained = json.loads((config.run_dir / CONFIG_NAME).read_bytes())
        return "megatron" if trained.get("backend") == "megatron" else "hf"
    except (OSError, ValueError, AttributeError) as error:
        raise _config_error(f"{config.run_dir / CONFIG_NAME} cannot be read: {error}") from error


def run_folder(settings: Settings, job_id: str) -> RunFolder:
    """Return the folder in which this job's programs run."""
    return RunFolder(settings.data / RUNS / job_id)


def _train_run(ctx: JobContext, spec: TrainJob, run: RunFolder) -> TrainRun:
    with ctx.sessions.begin() as session:
        model = ModelRepository(session).by_id(spec.model)
        # Strings by now: the job was queued once its sources had left the datasets.
        datasets = DatasetRepository(session)
        dataset = datasets.by_id(str(spec.dataset))
        dataset_path = ctx.settings.data / dataset.path
        validation_path = None
        if spec.validation is not None:
            validation_path = ctx.settings.data / datasets.by_id(str(spec.validation)).path
    model_path = _model_folder(ctx.settings, model)
    check_model(model_path)
    if spec.backend == "megatron":
        _check_layout(spec, model_path)
    check_dataset(dataset_path, look=ctx.check)
    if validation_path is not None:
        check_dataset(validation_path, look=ctx.check)
    return TrainRun(
        backend=spec.backend,
        model_name_or_path=str(model_path),
        dataset_path=str(dataset_path),
        dataset_name=dataset.name,
        validation_path=None if validation_path is None else str(validation_path),
        output_dir=run.path,
        base_model=model.hub_id or model.name,
        num_processes=spec.num_processes,
        arguments=spec.arguments,
    )


def _check_layout(spec: TrainJob, model_path: Path) -> None:
    layout = spec.arguments.megatron.layout(spec.num_processes)
    layout.check(ModelShape.read(model_path))


def _export_run(ctx: JobContext, spec: ExportJob, run: RunFolder) -> ExportRun:
    train = run_folder(ctx.settings, str(spec.train))
    steps = train.saved_steps()
    if not steps:
        raise _config_error(f"train job '{spec.train}' has no saved state to export")
    if spec.step is not None and spec.step not in steps:
        raise _config_error(
            f"step: train job '{spec.train}' has the saved steps {', '.join(map(str, steps))}, got {spec.step}"
        )
    return ExportRun(
        run_dir=train.path,
        output_dir=run.path,
        step=spec.step,
        dtype=spec.dtype,
        form=spec.form,
    )


def _model_folder(settings: Settings, model: Model) -> Path:
    if model.path is not None:
        return settings.data / model.path
    return model_folder(str(model.hub_id), revision=model.hub_revision)


def _config_error(message: str) -> JobError:
    return JobError(message, reason=FailReason.CONFIG_ERROR, phase=Phase.PREPARING)
