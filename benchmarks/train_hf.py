"""One case of the training benchmark with the hf backend, its Trainer included; train_throughput.py starts it on every GPU."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from train_cases import NO, YES, Case, Measured, model_config
from train_child import Device, run_case
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import SaveStrategy

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.nn.attention import ATTENTION, register
from tevatron.core.nn.compiling import compile_layers
from tevatron.core.nn.forward import YesNoHead
from tevatron.trainer.program.backends.hf.arguments import (
    check_arguments,
    set_length,
    training_arguments,
)
from tevatron.trainer.program.backends.hf.trainer import RerankTrainer
from tevatron.trainer.program.best import Best
from tevatron.trainer.program.context import Run
from tevatron.trainer.program.data.groups import Group, GroupDataset
from tevatron.trainer.program.data.sampling import Sampling
from tevatron.trainer.program.data.schedule import Draw, Schedule
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.module import RerankModule
from tevatron.trainer.program.settings import RankEnvironment
from tevatron.trainer.program.stopping import Stopper

HEAD = YesNoHead(yes=YES, no=NO)


class FullLogits(RerankModule):
    """Scores as the reference does: the whole vocabulary at every token of padded rows, then one token's two numbers."""

    def forward(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return fp32 scores; the rows are padded on the left to one width."""
        device = next(self.parameters()).device
        logits_PSV = self.model(
            input_ids=torch.tensor(prompts, device=device), use_cache=False
        ).logits
        logits_PV = logits_PSV[:, -1].float()
        return logits_PV[:, HEAD.yes] - logits_PV[:, HEAD.no]


class _Queries(GroupDataset):
    """The case's queries, in memory."""

    def __init__(self, case: Case) -> None:
        self._queries = [query for step in case.step_groups() for query in step]

    def __len__(self) -> int:
        return len(self._queries)

    def __getitem__(self, draw: Draw) -> Group:
        return Group(
            prompts=self._queries[draw.row],
            teacher=None,
            num_groups=draw.num_groups,
            num_truncated=0,
        )


class _InOrder(Sampling):
    def order(self, num_rows: int, *, epoch: int) -> list[int]:
        return list(range(num_rows))


class _Clock(TrainerCallback):
    """Times each step on this rank; what it waits for others is in it."""

    def __init__(self, case: Case, device: Device) -> None:
        self.seconds: list[float] = []
        self._case = case
        self._device = device
        self._start = 0.0

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        if len(self.seconds) == self._case.warmup:
            self._device.reset_peak()
        self._device.synchronize()
        self._start = time.perf_counter()

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        self._device.synchronize()
        self.seconds.append(time.perf_counter() - self._start)


class _Measured(RerankTrainer):
    """Leaves the optimizer out where the case says so: one number is stepped, no parameter of the model."""

    with_optimizer = True

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.with_optimizer:
            return super().create_optimizer()
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1, device=self.args.device))])
        return self.optimizer


def make_model(case: Case, device: torch.device) -> PreTrainedModel:
    """Build the model with random fp32 weights on the device."""
    config = AutoConfig.for_model(**model_config(case.model))
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    register()
    model.set_attn_implementation(ATTENTION if case.packed else "sdpa")
    if case.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def measure(case: Case) -> Measured:
    """Train through our Trainer and time its steps."""
    environment = RankEnvironment.read()
    if case.lora or case.tensor * case.pipeline * case.expert > 1:
        raise ValueError("the hf backend is measured with all weights trained and whole layers")
    # All of a replica's queries at once, which passes of the token budget divide; or in padded micro batches.
    micro_batch = case.queries if case.packed else case.micro_batch
    arguments = TrainArguments(
        dtype="bfloat16",
        packing=case.packed,
        packing_max_tokens=case.tokens,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=case.queries // micro_batch,
        gradient_checkpointing=case.recompute,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=1.0 if case.optimizer_step else 0.0,
        max_steps=case.warmup + case.steps,
        logging_steps=1000,
        save_steps=1000,
        fsdp=case.fsdp,
        torch_compile=case.compile,
    )
    check_arguments(arguments, num_ranks=case.gpus)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        made = training_arguments(arguments, run_dir, num_ranks=case.gpus, others={})
        made.save_strategy = SaveStrategy.NO
        if case.fsdp and case.method == "reference":
            made.fsdp_config = {"version": 1, "reshard_after_forward": case.fsdp}
            # Of FSDP1 accelerate has a strategy of its own beside what transformers gives it, and full_shard is its default.
            made.fsdp_plugin_args = {
                **(made._process_fsdp_args() or {}),
                "sharding_strategy": case.fsdp,
            }
        set_length(made, arguments, total_steps=arguments.max_steps)
        run = make_run(case, arguments, run_dir, EventWriter(run_dir, rank=environment.rank))
        return _trained(case, run, made)


def make_run(case: Case, arguments: TrainArguments, run_dir: Path, events: EventWriter) -> Run:
    """Return the run that the trainer asks for its schedule."""
    return Run(
        run_dir=run_dir,
        arguments=arguments,
        schedule=Schedule(
            num_rows=case.queries * case.gpus * arguments.max_steps,
            micro_batch=arguments.per_device_train_batch_size,
            num_micro_batches=arguments.gradient_accumulation_steps,
            num_ranks=case.gpus,
            num_epochs=1,
            max_steps=arguments.max_steps,
        ),
        sampling=_InOrder(
            seed=0, group_size=case.group_size, first_positive=True, first_negatives=True
        ),
        dataset_sha256="",
        validation=None,
        best=Best(),
        events=events,
        stopper=Stopper(run_dir, rank=events.rank),
    )


def _trained(case: Case, run: Run, made: TrainingArguments) -> Measured:
    device = Device(made.device)
    model = make_model(case, made.device)
    kind = RerankModule if case.packed else FullLogits
    if case.compile:
        compile_layers(model)
    module = kind(model, HEAD, packing=case.packed, pad_to_multiple_of=16)
    total = sum(parameter.numel() for parameter in module.parameters())
    trainer = _Measured(module, run, _Queries(case), made)
    trainer.with_optimizer = case.optimizer_step
    clock = _Clock(case, device)
    trainer.add_callback(clock)
    trainer.train()
    held = sum(_local(parameter).numel() for parameter in trainer.model_wrapped.parameters())
    peak = torch.tensor(device.peak_bytes(), device=made.device)
    if case.gpus > 1:
        torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    return Measured(
        step_seconds=clock.seconds[case.warmup :],
        peak_bytes=int(peak),
        gpu=device.name,
        note=f"each GPU holds {held / total:.0%} of the parameters" if case.gpus > 1 else "",
    )


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


if __name__ == "__main__":
    run_case(measure)
