"""Scoring throughput: engines x model shapes, offline and over HTTP, beside the reference way in the same run.

    python benchmarks/score_throughput.py --models qwen3-0.6b,qwen3-4b --engines hf,vllm --vllm_python .venv-vllm/bin/python

For each shape (random weights, see score_shapes.py), on the same pairs (16 queries x 100 candidates a round, every
round's pairs are new, so that no cache has seen them):
- `reference`: transformers, padded batches of 64, logits of the whole vocabulary at every token;
- an engine offline: its `score` on token ids, all of a round at once;
- the same engine over HTTP: the process that measured it becomes the server, a client on this machine has one request (100
  candidates) for each query in flight; latencies are those of the requests, tokenising included.
Each method runs in a process of its own. Rows are added to benchmarks/results/score_throughput.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from record import RESULTS, row, write_rows
from score_shapes import MODELS, PairText, make_model, make_pairs, make_tokenizer, model_config

from tevatron.core.model_shape import ModelShape
from tevatron.core.prompts import Pair, Renderer, get_template

MAX_LENGTH = 512
Rounds = list[list[list[PairText]]]
"""Pairs by round and query."""


def main() -> None:
    """Measure, print a table, and add the rows to the results."""
    args = parse()
    if args.worker:
        WORKERS[args.worker](args)
        return
    rows = []
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory(dir=args.work_dir, prefix="score-") as folder:
            for one in measure_model(args, name, make_model(name, Path(folder))):
                rows.append(one)
                print(json.dumps(one), flush=True)
                if not args.dry:
                    _add(rows)
    print(table(rows))


def measure_model(args: argparse.Namespace, name: str, folder: Path) -> Iterator[dict[str, object]]:
    """Measure every method on one model; yields each row as it is measured."""
    active = ModelShape.of(model_config(name).to_dict()).num_active_params
    reference: dict[str, object] | None = None
    for method in [*(["reference"] if args.reference else []), *args.engines.split(",")]:
        compiled = ", compiled" * (args.compile and method == "hf")
        with _worker(args, method, folder) as (found, port):
            if method == "reference":
                reference = found
            yield _row(name, method, f"offline{compiled}", found, active, reference)
            if method != "reference":
                served = {**found, **over_http(args, port)}
                yield _row(name, method, f"HTTP{compiled}", served, active, reference)


def _row(
    name: str,
    method: str,
    how: str,
    found: dict[str, object],
    active: int,
    reference: dict[str, object] | None,
) -> dict[str, object]:
    more: dict[str, object] = {
        key: found[key]
        for key in ("p50_ms", "p95_ms", "p99_ms", "peak_gib", "engine")
        if key in found
    }
    if reference is not None and method != "reference" and how.startswith("offline"):
        pairs = list(zip(reference["scores"], found["scores"], strict=True))  # type: ignore[call-overload]
        spread = statistics.pstdev(reference["scores"])  # type: ignore[arg-type]
        largest = max(abs(one - other) for one, other in pairs)
        more["score_difference"] = f"{largest:.3g} at a deviation of {spread:.3g}"
    is_reference = method == "reference"
    return row(
        name="score_throughput",
        model=name,
        layout="padded, full logits, batches of 64" if is_reference else f"{method}, {how}",
        method="reference" if is_reference else "ours",
        value=round(float(found["pairs_per_s"]), 1),  # type: ignore[arg-type]
        unit="pairs/s",
        tokens_per_s=round(float(found["tokens_per_s"])),  # type: ignore[arg-type]
        share_of_peak=round(2 * active * float(found["tokens_per_s"]) / float(found["peak"]), 3),  # type: ignore[arg-type]
        **more,
    )


def make_rounds(args: argparse.Namespace, *, first: int = 0) -> tuple[Rounds, Renderer]:
    """Return the pairs of as many rounds and one for warming up before them, from a seed on."""
    renderer = Renderer(get_template("tevatron"), make_tokenizer(), max_length=MAX_LENGTH)
    bare = len(renderer.render(Pair(query="", text="")).ids)
    rounds = [
        make_pairs(seed, queries=args.queries, candidates=args.candidates, template_tokens=bare)
        for seed in range(first, first + args.rounds + 1)
    ]
    return rounds, renderer


def token_ids(pairs: Sequence[Sequence[PairText]], renderer: Renderer) -> list[list[int]]:
    """Return the prompts' ids, query by query."""
    flat = [Pair(query=one.query, text=one.text) for query in pairs for one in query]
    return [one.ids for one in renderer.render_all(flat)]


def engine(args: argparse.Namespace) -> None:
    """Measure the engine's own rate in this process, then be its server until SIGTERM."""
    from tevatron.scorer import loading
    from tevatron.scorer.server.arguments import parse as parse_server
    from tevatron.scorer.server.main import main as serve

    rounds, renderer = make_rounds(args)
    argv = ["--backend", args.engine, "--model", args.folder, "--prompt_template", "tevatron"]
    argv += ["--rerank_max_len", str(MAX_LENGTH), "--dtype", args.dtype]
    argv += ["--host", "127.0.0.1", "--port", args.port]
    argv += ["--compile"] if args.compile and args.engine == "hf" else []
    if args.max_batch_tokens:
        argv += ["--max_batch_tokens", str(args.max_batch_tokens)]
    served = loading.load(parse_server(argv)[0])
    found = _timed([token_ids(one, renderer) for one in rounds], served.engine.score)
    versions = served.engine.info().versions.items()
    _tell({**found, "engine": ", ".join(f"{name} {number}" for name, number in versions)})
    # The server as it is, but for the loading, which has been done.
    loading.load = lambda _: served
    sys.exit(serve(argv))


def reference(args: argparse.Namespace) -> None:
    """Measure what the reference's server does: padded batches of 64, logits of the whole vocabulary."""
    import torch
    from transformers import AutoModelForCausalLM

    rounds, renderer = make_rounds(args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype).to(device).eval()
    answers = renderer.answer_ids
    assert answers is not None, "the template has answers"

    def score(prompts: Sequence[Sequence[int]]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(prompts), 64):
            batch = prompts[start : start + 64]
            width = max(len(ids) for ids in batch)
            ids = torch.tensor([[*one, *[0] * (width - len(one))] for one in batch], device=device)
            last = torch.tensor([len(one) - 1 for one in batch], device=device)
            mask = torch.arange(width, device=device) <= last[:, None]
            with torch.no_grad():
                logits = model(input_ids=ids, attention_mask=mask).logits
            two = logits[torch.arange(len(batch), device=device), last].float()
            scores += (two[:, answers.yes] - two[:, answers.no]).tolist()
        return scores

    _tell(_timed([token_ids(one, renderer) for one in rounds], score))


def _tell(found: dict[str, object]) -> None:
    """Write the result as a line; libraries write lines of their own."""
    print(f"{_RESULT}{json.dumps(found)}", flush=True)


def _timed(rounds, score) -> dict[str, object]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    import torch

    score(rounds[0])
    times, scores = [], []
    for prompts in rounds[1:]:
        start = time.perf_counter()
        scores += score(prompts)
        times.append(time.perf_counter() - start)
    found = {
        "pairs_per_s": sum(len(prompts) for prompts in rounds[1:]) / sum(times),
        "tokens_per_s": sum(len(ids) for prompts in rounds[1:] for ids in prompts) / sum(times),
        "scores": scores,
    }
    # vLLM's model lies in a process of its own.
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    return {**found, "peak": matmul_peak()}


def matmul_peak() -> float:
    """Measure FLOP/s of a large matrix product: bf16 on a GPU, fp32 on a CPU."""
    import torch

    on_gpu = torch.cuda.is_available()
    size, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    left = torch.randn(size, size, dtype=dtype, device="cuda" if on_gpu else "cpu")
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(10):
            left @ left
        if on_gpu:
            torch.cuda.synchronize()
        rates.append(10 * 2 * size**3 / (time.perf_counter() - start))
    return max(rates)


WORKERS = {"engine": engine, "reference": reference}
_RESULT = "result: "


@contextmanager
def _worker(
    args: argparse.Namespace, method: str, folder: Path
) -> Iterator[tuple[dict[str, object], int]]:
    """Run a method in a process of its own; yields what it measured, and the port on which it serves then."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python = args.vllm_python if method == "vllm" else sys.executable
    worker = method if method == "reference" else "engine"
    argv = [python, sys.argv[0], "--worker", worker, "--engine", method, "--folder", str(folder)]
    argv += ["--port", str(port)]
    for name in ("queries", "candidates", "rounds", "dtype", "max_batch_tokens"):
        if getattr(args, name) is not None:
            argv += [f"--{name}", str(getattr(args, name))]
    argv += ["--compile"] if args.compile else []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=_environment()) as process:
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            if line.startswith(_RESULT):
                break
        else:
            raise RuntimeError(f"{method} ended with status {process.wait()} and no result")
        # Its later output would fill the pipe.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        try:
            yield json.loads(line.removeprefix(_RESULT)), port
        finally:
            process.send_signal(signal.SIGTERM)


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TEVATRON_")}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def over_http(args: argparse.Namespace, port: int) -> dict[str, object]:
    """Measure the server from a client on this machine."""
    # The engine has seen the others, and may remember them.
    rounds, renderer = make_rounds(args, first=args.rounds + 1)
    tokens = sum(len(ids) for one in rounds[1:] for ids in token_ids(one, renderer))
    _wait(port)
    asyncio.run(_ask(port, rounds[:1]))
    seconds, latencies = asyncio.run(_ask(port, rounds[1:]))
    cuts = statistics.quantiles(latencies, n=100) if len(latencies) > 1 else latencies * 99
    return {
        "pairs_per_s": args.rounds * args.queries * args.candidates / seconds,
        "tokens_per_s": tokens / seconds,
        **{f"p{at}_ms": round(1000 * cuts[at - 1]) for at in (50, 95, 99)},
    }


def _wait(port: int, timeout_s: float = 60.0) -> None:
    import httpx

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"the server was not ready within {timeout_s:g} s")


async def _ask(port: int, rounds: Rounds) -> tuple[float, list[float]]:
    """Send each query's candidates as one request; a connection for each query of a round.

    Returns the seconds until all had their answers, and each request's own.
    """
    import httpx

    latencies: list[float] = []

    async def one_connection(place: int, client: httpx.AsyncClient) -> None:
        for number, queries in enumerate(rounds):
            candidates = [
                {"query_id": f"{number}-{place}", "docid": str(at), **pair._asdict()}
                for at, pair in enumerate(queries[place])
            ]
            start = time.perf_counter()
            answer = await client.post("/score", json={"candidates": candidates})
            latencies.append(time.perf_counter() - start)
            answer.raise_for_status()
            assert len(answer.json()["scores"]) == len(candidates)

    async with AsyncExitStack() as stack:
        # Each reads the system's certificates as it is made, which takes as long as many requests.
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=600)
            )
            for _ in rounds[0]
        ]
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for place, client in enumerate(clients):
                group.create_task(one_connection(place, client))
        return time.perf_counter() - start, latencies


def table(rows: list[dict[str, object]]) -> str:
    """Return the rows as a table."""
    columns = [
        "model",
        "layout",
        "value",
        "tokens_per_s",
        "p50_ms",
        "p95_ms",
        "p99_ms",
        "share_of_peak",
    ]
    lines = [" | ".join(["pairs/s" if one == "value" else one for one in columns])]
    lines += [" | ".join(str(one.get(column, "")) for column in columns) for one in rows]
    return "\n".join(lines)


def _add(rows: list[dict[str, object]]) -> None:
    """Put the rows after those of other models and methods that the file already has."""
    import torch

    path = RESULTS / "score_throughput.json"
    before = json.loads(path.read_text()) if path.exists() else []
    gpus = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    packages = ("torch", "transformers")
    written = json.loads(
        write_rows("score_throughput", rows, packages=packages, gpus=gpus).read_text()
    )
    places = {(one["model"], one["layout"], one["gpus"]) for one in written}
    kept = [one for one in before if (one["model"], one["layout"], one["gpus"]) not in places]
    path.write_text(json.dumps([*kept, *written], indent=1) + "\n")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=Path(__file__).stem)
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-4b", help=", ".join(MODELS))
    parser.add_argument("--engines", default="hf", help="hf, vllm or both")
    parser.add_argument("--vllm_python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="of engine hf")
    parser.add_argument("--max_batch_tokens", type=int)
    parser.add_argument("--queries", type=int, default=16, help="a round, and requests in flight")
    parser.add_argument("--candidates", type=int, default=100, help="a query")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-reference", dest="reference", action="store_false")
    parser.add_argument("--work_dir", help="where models of random weights are written")
    parser.add_argument("--dry", action="store_true", help="write no results")
    for name in ("worker", "engine", "folder", "port"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
