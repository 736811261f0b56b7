"""One case of the training benchmark with the megatron backend; train_throughput.py starts it on every GPU."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch
from megatron.bridge import AutoBridge
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from train_cases import NO, YES, Case, Measured, model_config
from train_child import Device, profile, run_case
from transformers import AutoConfig

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.nn.forward import YesNoHead
from tevatron.trainer.program.backends.megatron.engine import Engine
from tevatron.trainer.program.backends.megatron.model import build_model
from tevatron.trainer.program.backends.megatron.optimizer import make_optimizer
from tevatron.trainer.program.backends.megatron.parallel import Ranks, check_layout, join_ranks
from tevatron.trainer.program.data.groups import Group
from tevatron.trainer.program.settings import RankEnvironment

HEAD = YesNoHead(yes=YES, no=NO)


def full_logits(head: YesNoHead, **given: object) -> torch.Tensor:
    """Score as the reference does: the whole vocabulary at every token, then one token's two numbers."""
    logits_SBV, _ = given["output_layer"](given["hidden_states"], weight=given["output_weight"])
    # The reference reads local columns, which is wrong at TP > 1; here the shards are put together.
    logits_PV = gather_from_tensor_model_parallel_region(
        logits_SBV.flatten(0, 1).index_select(0, given["context"].rows).float()
    )
    return logits_PV[:, head.yes] - logits_PV[:, head.no]


def arguments_of(case: Case) -> TrainArguments:
    """Return the arguments that the case means."""
    if not case.optimizer_step:
        raise ValueError("the megatron backend is measured with its optimizer step")
    return TrainArguments(
        dtype="bfloat16",
        packing=case.packed,
        packing_max_tokens=case.tokens,
        per_device_train_batch_size=case.micro_batch,
        use_lora=case.lora,
        lora_target_groups=case.lora_groups,
        gradient_checkpointing=case.recompute,
        megatron=case.megatron,
    )


def make_engine(case: Case, ranks: Ranks, arguments: TrainArguments) -> Engine:
    """Build the model with random weights."""
    config = AutoConfig.for_model(**model_config(case.model))
    bridge = AutoBridge.from_hf_config(config)
    model = build_model(bridge, arguments, ranks, load_weights=False)
    engine = Engine.of(
        model,
        make_optimizer(model, arguments),
        ranks,
        arguments=arguments,
        head=HEAD,
        softcap=None,
    )
    if not case.packed:
        object.__setattr__(engine, "scores", partial(full_logits, HEAD))
    return engine


def measure(case: Case) -> Measured:
    """Time the steps of this replica's queries."""
    environment = RankEnvironment.read()
    arguments = arguments_of(case)
    layout = check_layout(arguments.megatron, case.shape, world=environment.world_size)
    ranks = join_ranks(layout, environment, seed=1)
    engine = make_engine(case, ranks, arguments)
    device = Device(ranks.device)
    times = []
    for number, queries in enumerate(case.step_groups()):
        groups = [
            Group(prompts=one, teacher=None, num_groups=len(queries), num_truncated=0)
            for one in queries[ranks.data_rank :: layout.data]
        ]
        if number == case.warmup:
            device.reset_peak()
        device.synchronize()
        ranks.barrier()
        start = time.perf_counter()
        engine.step(groups, rate=1e-6)
        device.synchronize()
        ranks.barrier()
        if number >= case.warmup:
            times.append(time.perf_counter() - start)
    if case.profile:
        path = Path(f"{case.profile}.{environment.rank}")
        profile(path, partial(engine.step, groups, rate=1e-6))
    return Measured(step_seconds=times, peak_bytes=ranks.most(device.peak_bytes()), gpu=device.name)


if __name__ == "__main__":
    run_case(measure)
