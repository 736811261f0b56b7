"""64 clients with mixed sizes against the server as a process, with the Hugging Face engine on a tiny model.

TEVATRON_SOAK_S=60 makes it long. Small requests come from 48 clients, with and without 16 others that send large ones.
"""

import asyncio
import json
import os
import random
import signal
import statistics
import time

import httpx
import pytest
from tests.support.processes import running, wait_for
from tests.support.servers import free_port, server_command, server_environment
from tests.support.tiny_model import tiny_folder

SOAK_S = float(os.environ.get("TEVATRON_SOAK_S", "10"))
NUM_SMALL = 48
MEDIUM, LARGE = (12, 100), (4, 1500)
"""Clients, and the pairs of each of their requests."""
WORDS = [
    "bee",
    "flower",
    "nectar",
    "island",
    "cello",
    "string",
    "bow",
    "lighthouse",
    "ledger",
    "tide",
    "oil",
    "letter",
    "harbour",
    "clerk",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny_folder(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    port = free_port()
    argv = server_command(folder, port, "--prompt_template tevatron --rerank_max_len 200")
    log = tmp_path_factory.mktemp("log") / "log"
    with running(argv, environment=server_environment(), log=log) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: _is_ready(url, process), timeout_s=200, what="the server to be ready")
        yield process, port, log


def _is_ready(url, process):
    assert process.poll() is None, "the server ended"
    try:
        return httpx.get(f"{url}/ready", trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False


class _Client:
    """One kept connection, and as little work as possible: the server's time is what is measured."""

    def __init__(self, port):
        self._port = port
        self._streams = None

    async def score(self, candidates):
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        body = json.dumps({"candidates": candidates}).encode()
        writer.write(
            b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        content = await reader.readexactly(length)
        assert head.startswith(b"HTTP/1.1 200"), content[:500]
        return json.loads(content)["scores"]

    async def close(self):
        if self._streams is not None:
            self._streams[1].close()
            await self._streams[1].wait_closed()


def _pairs():
    draw = random.Random(5)
    return [
        {
            "query": " ".join(draw.choices(WORDS, k=3)),
            "text": " ".join(draw.choices(WORDS, k=draw.randint(1, 12))),
        }
        for _ in range(400)
    ]


async def _work(port, sizes, until, pairs, expected, latencies, draw):
    """Send requests one after the other, and check each answer whole."""
    client = _Client(port)
    try:
        while time.monotonic() < until:
            chosen = draw.choices(range(len(pairs)), k=draw.choice(sizes))
            candidates = [
                {"query_id": "q", "docid": str(place), **pairs[at]}
                for place, at in enumerate(chosen)
            ]
            started = time.perf_counter()
            scores = await client.score(candidates)
            latencies.append(time.perf_counter() - started)
            assert [one["docid"] for one in scores] == [one["docid"] for one in candidates]
            for one, at in zip(scores, chosen, strict=True):
                assert abs(one["score"] - expected[at]) < 1e-4
    finally:
        await client.close()


async def _soak(port, groups, seconds, pairs, expected):
    """Run clients for some seconds; returns the latencies of each group."""
    until = time.monotonic() + seconds
    found = [[] for _ in groups]
    async with asyncio.TaskGroup() as tasks:
        for group, (number, sizes) in enumerate(groups):
            for client in range(number):
                draw = random.Random(f"{group} {client}")
                tasks.create_task(_work(port, sizes, until, pairs, expected, found[group], draw))
    return found


def _p95(latencies):
    return statistics.quantiles(latencies, n=20)[-1]


def _rss_mib(pid):
    with open(f"/proc/{pid}/status") as status:  # noqa: PTH123
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


async def _all_scores(port, pairs):
    client = _Client(port)
    candidates = [
        {"query_id": "q", "docid": str(place), **pair} for place, pair in enumerate(pairs)
    ]
    try:
        return [one["score"] for one in await client.score(candidates)]
    finally:
        await client.close()


@pytest.mark.timeout(400)
def test_mixed_load(server):
    process, port, _ = server
    pairs = _pairs()
    expected = asyncio.run(_all_scores(port, pairs))
    small = (NUM_SMALL, (1, 2, 4))
    large = [(number, (size,)) for number, size in (MEDIUM, LARGE)]
    part = max(3.0, SOAK_S / 5)
    (alone,) = asyncio.run(_soak(port, [small], part, pairs, expected))
    asyncio.run(_soak(port, [small, *large], part, pairs, expected))  # warms caches and pools up
    before = _rss_mib(process.pid)
    mixed, medium, big = asyncio.run(_soak(port, [small, *large], SOAK_S, pairs, expected))
    grown = _rss_mib(process.pid) - before
    report = (
        f"p95 of small requests: {_p95(alone) * 1000:.0f} ms alone ({len(alone)}), {_p95(mixed) * 1000:.0f} ms "
        f"({len(mixed)}) beside {len(medium)} of {MEDIUM[1]} pairs and {len(big)} of {LARGE[1]}; RSS {before:.0f} MiB, "
        f"then {grown:+.0f}"
    )
    print(report)  # noqa: T201
    assert _p95(mixed) < 5 * _p95(alone), report
    assert grown < 0.1 * before, report
    assert len(big) >= LARGE[0], report
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    for line in ("queue_tokens 0.0", "num_requests_running 0.0", "num_requests_waiting 0.0"):
        assert f"tevatron_scorer_{line}\n" in text
    assert 'status="5' not in text


def test_what_runs_is_finished_on_sigterm(server):
    """The last test of this file: the server is gone after it."""
    process, port, log = server
    pairs = _pairs()

    async def score():
        client = _Client(port)
        candidates = [
            {"query_id": "q", "docid": str(place), **pairs[place % len(pairs)]}
            for place in range(5000)
        ]
        asked = asyncio.create_task(client.score(candidates))
        await asyncio.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        try:
            return await asked
        finally:
            await client.close()

    scores = asyncio.run(score())
    assert [one["docid"] for one in scores] == [str(place) for place in range(5000)]
    assert process.wait(30) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert lines
    assert [line for line in lines if line["level"] == "error"] == []
