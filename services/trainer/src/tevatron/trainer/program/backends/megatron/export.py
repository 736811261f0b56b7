"""A checkpoint from a saved state alone: one process reads the weights of any layout, and publishes them."""

from __future__ import annotations

import torch

from tevatron.core.contracts.checkpoint import Dtype
from tevatron.core.contracts.megatron import MegatronArguments
from tevatron.core.contracts.run import ExportRun, TrainRun
from tevatron.core.errors import ConfigError
from tevatron.core.model_shape import ModelShape
from tevatron.trainer.program.backends.megatron.parallel import (
    check_layout,
    join_ranks,
    leave_ranks,
)
from tevatron.trainer.program.backends.megatron.run import (
    finish_export,
    load_engine,
    write_export,
)
from tevatron.trainer.program.backends.megatron.state import load_weights
from tevatron.trainer.program.data.rows import RowFile
from tevatron.trainer.program.exporting import Export
from tevatron.trainer.program.models import BaseModel
from tevatron.trainer.program.settings import RankEnvironment
from tevatron.trainer.program.states import State


def export_state(
    config: ExportRun, run: TrainRun, state: State, base: BaseModel, *, dtype: Dtype
) -> None:
    """Publish the state's weights, merged or as adapters alone."""
    if config.form == "adapter" and not run.arguments.use_lora:
        raise ConfigError("form 'adapter' needs a LoRA run, this one trained all weights")
    own = run.arguments.megatron
    single = own.model_copy(
        update={
            name: field.default
            for name, field in MegatronArguments.model_fields.items()
            if name.endswith("_parallel_size") or name == "use_megatron_fsdp"
        }
    )
    arguments = run.arguments.model_copy(update={"megatron": single})
    layout = check_layout(single, ModelShape.read(base.folder), world=1)
    ranks = join_ranks(layout, RankEnvironment.read(), seed=arguments.seed)
    engine = load_engine(base, arguments, ranks)
    load_weights(state.folder, engine.model)
    export = Export(
        output_dir=config.output_dir,
        # What was trained with, not what this process is cut into.
        run=run,
        base=base,
        dataset_sha256=RowFile(config.run_dir).summary.dataset_sha256,
        dtype=dtype,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        adapter_only=config.form == "adapter",
    )
    written, scores = write_export(export, engine)
    leave_ranks()
    # What is loaded back needs the memory.
    del engine
    finish_export(export, written, scores, step=state.step)
