"""Packed scores beside padded ones on a GPU: what bf16 costs, and what packing adds to it. Random weights, megatron backend.

    torchrun --nproc-per-node 1 benchmarks/packed_scores.py --model qwen3-0.6b

The same weights, bf16 numbers, score the same prompts three times: padded in fp32, padded in bf16 and packed in bf16.
A root mean square says more than the largest of a few: that one is another for other prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from record import row, write_rows
from train_cases import MODELS, Case, Prompts
from train_megatron import arguments_of, make_engine

from tevatron.trainer.program.backends.megatron.engine import Engine
from tevatron.trainer.program.backends.megatron.parallel import check_layout, join_ranks
from tevatron.trainer.program.settings import RankEnvironment

PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformer-engine")


def root_mean_square(differences: Sequence[float]) -> float:
    """Return the root of the mean of the squares."""
    return math.hypot(*differences) / math.sqrt(len(differences))


def largest(differences: Sequence[float]) -> float:
    """Return the largest one, whatever its sign."""
    return max(map(abs, differences))


KINDS = {"root mean square": root_mean_square, "largest": largest}


def main() -> None:
    """Score, compare, and write the rows."""
    args = parse()
    case = Case(
        backend="megatron",
        method="ours",
        model=args.model,
        tokens=8192,
        queries=args.queries,
        steps=1,
        warmup=0,
    )
    fp32, padded, packed = measure(case)
    compared = {
        "padded bf16 to padded fp32": (padded, fp32),
        "packed bf16 to padded fp32": (packed, fp32),
        "packed bf16 to padded bf16": (packed, padded),
    }
    rows = [
        row(
            name="packed_scores",
            model=args.model,
            layout=f"{len(fp32)} prompts, deviation {statistics.pstdev(fp32):.3g}",
            method="ours",
            value=round(how([one - other for one, other in zip(*both, strict=True)]), 5),
            unit=f"{kind} difference, {unit}",
        )
        for kind, how in KINDS.items()
        for unit, both in compared.items()
    ]
    for one in rows:
        print(one["unit"], one["value"], one["layout"])
    gpus = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    write_rows("packed_scores", rows, packages=PACKAGES, gpus=gpus)


def measure(case: Case) -> tuple[list[float], list[float], list[float]]:
    """Return the scores of padded fp32, of padded bf16 and of packed bf16."""
    environment = RankEnvironment.read()
    layout = check_layout(case.megatron, case.shape, world=environment.world_size)
    ranks = join_ranks(layout, environment, seed=1)
    arguments = arguments_of(case)
    prompts = prompts_of(case)
    engine = make_engine(case, ranks, arguments)
    exact = make_engine(case, ranks, arguments.model_copy(update={"dtype": "float32"}))
    copy_weights(engine, exact)
    return (
        padded_engine(exact).score(prompts),
        padded_engine(engine).score(prompts),
        engine.score(prompts),
    )


def prompts_of(case: Case) -> Prompts:
    """Return the prompts of one step."""
    return [prompt for query in case.step_groups()[0] for prompt in query]


def padded_engine(engine: Engine) -> Engine:
    """Return the engine as `--no_packing` has it."""
    return dataclasses.replace(
        engine, arguments=engine.arguments.model_copy(update={"packing": False})
    )


def copy_weights(source: Engine, target: Engine) -> None:
    """Put one model's weights into another of the same shape and other numbers."""
    for own, others in zip(source.model.chunks, target.model.chunks, strict=True):
        for given, taken in zip(own.parameters(), others.parameters(), strict=True):
            taken.data.copy_(given.data)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=Path(__file__).stem)
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--queries", type=int, default=128, help="of 8 prompts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
