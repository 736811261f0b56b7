"""Training throughput on GPUs, side by side: random weights of real sizes, the same pairs for every method, one command.

    python benchmarks/train_throughput.py dense matched single     # sets of cases, see SETS
    python benchmarks/train_throughput.py dense --only 0 1         # some of a set's cases, by their place in it
    python benchmarks/train_throughput.py --model qwen3-8b --gpus 2 --tensor 2 --tokens 8192 16384 --methods ours

Each case runs in processes of its own (torch.distributed.run), so that the memory of one is free for the next, and one
that runs out of memory is a row too. The rows go to `benchmarks/results/train_throughput.json` as they come.

`reference` is our re-creation of the reference's recipe: every micro batch padded to the step's longest prompt and
logits of the whole vocabulary at every token. `ours` is packed, with two rows of the vocabulary at the last tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import RESULTS, row, surroundings
from train_cases import MODELS, Case, Measured

HERE = Path(__file__).parent
ROOT = HERE.parent
PLACE = ("model", "layout", "method")
"""What tells one row from another."""
PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformer-engine", "transformers")

_8B = Case(backend="megatron", method="ours", model="qwen3-8b", gpus=2)
_HF = dataclasses.replace(_8B, backend="hf", warmup=1, steps=3)
_30B = dataclasses.replace(_8B, model="qwen3-30b-a3b", expert=2, lora=True)
_4B = Case(backend="hf", method="ours", model="qwen3-4b", optimizer_step=False)
_EIGHT = dataclasses.replace(_8B, gpus=8, warmup=1, steps=3)
_EIGHT_30B = dataclasses.replace(_EIGHT, model="qwen3-30b-a3b", expert=8)
_TINY = Case(backend="megatron", method="ours", model="qwen3-tiny", tokens=4096, warmup=1, steps=1)


def _both(case: Case, **reference: int) -> list[Case]:
    """Return the case our way and the reference's."""
    return [case, dataclasses.replace(case, method="reference", **reference)]


SETS: dict[str, list[Case]] = {
    # The reference's own topology, what it compares with, and what does not fit.
    "dense": [
        *_both(dataclasses.replace(_8B, tensor=2), steps=3),
        *_both(dataclasses.replace(_HF, fsdp="shard_grad_op")),
        *_both(dataclasses.replace(_HF, fsdp="full_shard")),
        _HF,
    ],
    # The same where the hf backend has room on two GPUs: 8B's rows are out of memory.
    "sharded": [
        *_both(dataclasses.replace(_HF, model="qwen3-4b", fsdp="shard_grad_op")),
        *_both(dataclasses.replace(_HF, model="qwen3-4b", fsdp="full_shard")),
        dataclasses.replace(_HF, model="qwen3-4b"),
        dataclasses.replace(_8B, model="qwen3-4b", fsdp="optim_grads_params"),
    ],
    # What is framework and what is layout: two replicas, recomputation on both sides.
    "matched": [
        *_both(dataclasses.replace(_8B, recompute=True, warmup=1, steps=3)),
        *_both(dataclasses.replace(_HF, fsdp="shard_grad_op", recompute=True)),
    ],
    "single": [
        *_both(_4B, steps=3, warmup=1, micro_batch=1),
        dataclasses.replace(_4B, compile=True, warmup=4),
    ],
    "experts": _both(dataclasses.replace(_30B, warmup=3), micro_batch=1, steps=2, warmup=1),
    # For the plan.
    "memory": [
        dataclasses.replace(_8B, tensor=2, tokens=8192, warmup=1, steps=2),
        dataclasses.replace(_8B, tokens=8192),
        dataclasses.replace(_8B, tensor=2, recompute=True, warmup=1, steps=2),
        dataclasses.replace(_8B, gpus=1, lora=True, warmup=1, steps=2),
        dataclasses.replace(_30B, tokens=8192, warmup=1, steps=2),
    ],
    # The paper's own layouts; eight_gpus.py has its figures.
    "eight": [
        *_both(dataclasses.replace(_EIGHT, tensor=2)),
        *_both(dataclasses.replace(_EIGHT, recompute=True)),
        *_both(dataclasses.replace(_EIGHT, backend="hf", fsdp="full_shard", recompute=True)),
        *_both(dataclasses.replace(_EIGHT, backend="hf", fsdp="shard_grad_op", recompute=True)),
        *_both(dataclasses.replace(_EIGHT, tensor=2, lora=True)),
        *_both(dataclasses.replace(_EIGHT_30B, lora=True), micro_batch=1),
        *_both(dataclasses.replace(_EIGHT_30B, tokens=8192), micro_batch=1),
        _EIGHT,  # which the paper does not have: its padded passes need the recomputation
    ],
    # Seconds: does every path run at all?
    "smoke": [
        *_both(_TINY),
        *_both(dataclasses.replace(_TINY, gpus=2, tensor=2)),
        dataclasses.replace(_TINY, gpus=2, pipeline=2),
        dataclasses.replace(_TINY, gpus=2, lora=True),
        dataclasses.replace(_TINY, gpus=2, context=2),
        dataclasses.replace(_TINY, gpus=2, fsdp="optim_grads_params"),
        *_both(dataclasses.replace(_TINY, gpus=2, model="qwen3-moe-tiny", expert=2)),
        dataclasses.replace(_TINY, gpus=2, model="qwen3-moe-tiny", expert=2, lora=True),
        *_both(dataclasses.replace(_TINY, backend="hf", gpus=2, fsdp="full_shard")),
        dataclasses.replace(_TINY, backend="hf", optimizer_step=False),
    ],
}


def main() -> int:
    """Measure the cases asked for; returns 1 where one ended without a figure."""
    args = parse()
    failed = 0
    for case in cases_of(args):
        started = time.monotonic()
        found = run(case, limit_s=args.limit_s)
        spent = time.monotonic() - started
        if found is None:
            failed += 1
            print(
                f"no figure: {case.model}, {case.label}, {case.method} ({spent:.0f} s)", flush=True
            )
            continue
        entry = to_row(case, found)
        print(json.dumps(entry), f"({spent:.0f} s)", flush=True)
        if not args.dry:
            add(entry, gpus=f"{case.gpus} x {found.gpu}")
    return int(failed > 0)


def run(case: Case, *, limit_s: float) -> Measured | None:
    """Measure a case in processes of its own; None where they failed, after their last words were printed."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(case.gpus), str(HERE / f"train_{case.backend}.py")),
    ]
    packages = [HERE, ROOT / "core" / "src", ROOT / "services" / "trainer" / "src"]
    path = [str(one) for one in packages] + [os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "measured.json", Path(folder) / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*command, case.to_json(), str(out)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            _wait(process, limit_s=limit_s)
        if out.exists():
            return Measured(**json.loads(out.read_text()))
        print(log.read_text(errors="replace")[-3000:], flush=True)
        return None


def _wait(process: subprocess.Popen[bytes], *, limit_s: float) -> None:
    try:
        process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        print(f"not done within {limit_s:.0f} s", flush=True)
        # torchrun ends its ranks; what is left after that is of its session.
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def to_row(case: Case, found: Measured) -> dict[str, object]:
    """Return the case's row of the results."""
    return row(
        name="train_throughput",
        model=case.model,
        layout=case.label,
        method=case.method,
        unit="pairs/s",
        **found.figures(case),
    )


def add(entry: dict[str, object], *, gpus: str) -> None:
    """Put the row after those of other models and layouts that the file already has."""
    path = RESULTS / "train_throughput.json"
    before = json.loads(path.read_text()) if path.exists() else []
    kept = [one for one in before if any(one[key] != entry[key] for key in PLACE)]
    path.write_text(
        json.dumps([*kept, {**entry, **surroundings(PACKAGES, gpus=gpus)}], indent=1) + "\n"
    )


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return the cases of the sets asked for, or those that the flags describe."""
    if args.sets:
        found = [case for name in args.sets for case in SETS[name]]
        return found if args.only is None else [found[place] for place in args.only]
    return [
        Case(
            backend=args.backend,
            method=method,
            model=args.model,
            gpus=args.gpus,
            tensor=args.tensor,
            pipeline=args.pipeline,
            expert=args.expert,
            context=args.context,
            fsdp=args.fsdp,
            lora=args.lora,
            recompute=args.recompute,
            permute_fusion=args.permute_fusion,
            compile=args.compile,
            profile=args.profile,
            tokens=tokens,
            micro_batch=args.micro_batch,
            queries=args.queries,
            group_size=args.group_size,
            optimizer_step=not args.no_optimizer,
            warmup=args.warmup,
            steps=args.steps,
        )
        for method in args.methods.split(",")
        for tokens in (args.tokens if method == "ours" else args.tokens[:1])
    ]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=Path(__file__).stem)
    parser.add_argument("sets", nargs="*", help=f"sets of cases: {', '.join(SETS)}")
    parser.add_argument("--only", type=int, nargs="+", help="places within the sets, from 0")
    parser.add_argument("--limit_s", type=float, default=120.0, help="seconds for one case")
    parser.add_argument("--dry", action="store_true", help="print the rows, keep none")
    parser.add_argument("--backend", choices=["megatron", "hf"], default="megatron")
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--expert", type=int, default=1)
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--fsdp", default="")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--permute_fusion", action="store_true")
    parser.add_argument("--compile", action="store_true", help="the layers, of the hf backend")
    parser.add_argument(
        "--profile", default="", help="files for the longest kernels of one more step"
    )
    parser.add_argument("--methods", default="ours,reference")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--micro_batch", type=int, default=4, help="queries a padded pass")
    parser.add_argument("--queries", type=int, default=16, help="a replica and step")
    parser.add_argument("--group_size", type=int, default=8, help="pairs a query")
    parser.add_argument("--no_optimizer", action="store_true", help="forward and backward alone")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args(argv)
    unknown = [name for name in args.sets if name not in SETS]
    if unknown:
        parser.error(f"no set of cases '{unknown[0]}'; there are {', '.join(SETS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
