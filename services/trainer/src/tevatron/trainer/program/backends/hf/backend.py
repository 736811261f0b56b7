"""The hf backend's part of a run: from checked data to a trained model in memory, on every rank."""

from __future__ import annotations

import logging

import torch
from transformers import TrainingArguments

from tevatron.core.nn.compiling import compile_layers
from tevatron.trainer.program.backends.hf import snapshot
from tevatron.trainer.program.backends.hf.trainer import RerankTrainer
from tevatron.trainer.program.context import Run
from tevatron.trainer.program.data.groups import GroupDataset
from tevatron.trainer.program.models import BaseModel, TrainableModel
from tevatron.trainer.program.module import RerankModule
from tevatron.trainer.program.states import State

logger = logging.getLogger(__name__)


class HfBackend:
    """Trains with `RerankTrainer`."""

    def __init__(self, run: Run, arguments: TrainingArguments) -> None:
        self._run = run
        self._arguments = arguments

    @property
    def device(self) -> torch.device:
        """Return this rank's device."""
        return self._arguments.device

    @property
    def is_sharded(self) -> bool:
        """Say whether the weights in memory are pieces: then only the saved state is whole."""
        return bool(self._run.arguments.fsdp)

    def train(
        self,
        base: BaseModel,
        trained: TrainableModel,
        dataset: GroupDataset,
        *,
        state: State | None,
    ) -> int:
        """Train to the end or until asked to stop; return the last step, whose state is saved."""
        options = self._run.arguments
        module = RerankModule(
            trained.model,
            base.head,
            packing=options.packing,
            pad_to_multiple_of=options.pad_to_multiple_of,
        )
        if state is not None and self._run.is_complete(state):
            logger.info("training was complete at step %d", state.step)
            load_state(module, state)
            return state.step
        if options.torch_compile:
            compile_layers(trained.model)
        trainer = RerankTrainer(module, self._run, dataset, self._arguments)
        with self._run.stopper.training():
            trainer.train(resume_from_checkpoint=None if state is None else str(state.folder))
        return int(trainer.state.global_step)


def load_state(module: RerankModule, state: State) -> None:
    """Put a state's weights into a module of one process."""
    snapshot.load_trainable_weights(module, state.folder / snapshot.WEIGHTS_FILE, sharded=False)
