"""`python -m tevatron.trainer.program.export config.json`: publish a checkpoint from a saved state of a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from transformers.utils import logging as transformers_logging

from tevatron.core.contracts.checkpoint import Dtype
from tevatron.core.contracts.jobs import Phase
from tevatron.core.contracts.run import CONFIG_NAME, ExportRun, TrainRun
from tevatron.core.errors import ConfigError, JobError
from tevatron.core.logging import configure_logging
from tevatron.core.nn.loading import DTYPES
from tevatron.core.process import die_with_parent
from tevatron.trainer.program.context import best_of
from tevatron.trainer.program.data.rows import RowFile
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.exporting import Export
from tevatron.trainer.program.failures import reason_of
from tevatron.trainer.program.models import open_base
from tevatron.trainer.program.settings import RankEnvironment
from tevatron.trainer.program.states import State, find_state
from tevatron.trainer.program.stopping import Stopper
from tevatron.trainer.program.train import load_whole, read_config

logger = logging.getLogger(__name__)


def export(config: ExportRun, events: EventWriter) -> None:
    """Publish the state that the config names."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    Stopper(config.output_dir, rank=0).install(lambda: events.stopped(None))
    events.phase(Phase.PREPARING)
    # The folder may have been moved since it was trained in.
    run = read_config(config.run_dir / CONFIG_NAME).model_copy(
        update={"output_dir": config.run_dir}
    )
    state = _chosen(config, run, events)
    dtype = config.dtype or run.arguments.export_dtype or run.arguments.dtype
    if dtype not in DTYPES or config.form not in ("merged", "adapter"):
        raise ConfigError(
            f"expected a dtype of {', '.join(DTYPES)} and form merged or adapter, got '{dtype}' and '{config.form}'"
        )
    base = open_base(run.model_name_or_path, run.arguments)
    events.phase(Phase.LOADING)
    if run.backend == "megatron":
        # Megatron is of its own environment, which the hf backend does not need.
        from tevatron.trainer.program.backends.megatron.export import export_state

        export_state(config, run, state, base, dtype=cast("Dtype", dtype))
        events.exported(state.step)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained = load_whole(base, run, state, device)
    events.phase(Phase.EXPORTING)
    Export(
        output_dir=config.output_dir,
        run=run,
        base=base,
        dataset_sha256=RowFile(config.run_dir).summary.dataset_sha256,
        dtype=cast("Dtype", dtype),
        device=device,
        adapter_only=config.form == "adapter",
    ).publish(trained, step=state.step)
    events.exported(state.step)


def _chosen(config: ExportRun, run: TrainRun, events: EventWriter) -> State:
    """Return the state that was asked for; without a step the best where the run keeps one, else the newest."""
    if config.step is not None:
        return find_state(config.run_dir, config.step)
    newest = find_state(config.run_dir, None)
    best = best_of(newest).step if run.arguments.load_best_model_at_end else None
    if best is None:
        events.log("info", f"exporting the newest state, of step {newest.step}")
        return newest
    events.log(
        "info", f"exporting the best state, of step {best}; the newest is of step {newest.step}"
    )
    return find_state(config.run_dir, best)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the export; return the exit code."""
    if RankEnvironment.read().attempt is not None:
        die_with_parent()
    configure_logging("trainer")
    words = sys.argv[1:] if argv is None else argv
    try:
        config = ExportRun.model_validate_json(Path(words[0]).read_bytes())
    except (IndexError, OSError, ValueError) as error:
        logger.error("expected one argument, an export run's config.json: %s", error)
        return 2
    config.output_dir.mkdir(parents=True, exist_ok=True)
    events = EventWriter(config.output_dir, rank=0)
    try:
        export(config, events)
    except Exception as error:
        phase = error.phase if isinstance(error, JobError) else None
        logger.exception("the export failed")
        events.failed(reason_of(error), str(error) or type(error).__name__, phase=phase)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
