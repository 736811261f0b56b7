"""The server with this engine as a process: proof, scores over HTTP beside the hf server's, and the end of its processes."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.support.processes import running, wait_for
from tests.vllm.models import save_contract, save_model

START_S = 300.0
WORDS = [
    "bee",
    "swarm",
    "hive",
    "queen",
    "winter",
    "honey",
    "river",
    "stone",
    "market",
    "law",
    "tax",
    "ship",
    "harbour",
    "wind",
    "grain",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_contract(save_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3"))


class Server:
    """A server, and a client of it."""

    def __init__(self, process, client, log):
        self.process = process
        self.client = client
        self.log = log

    def is_ready(self):
        assert self.process.poll() is None, f"the server ended: {self.log.read_text()[-3000:]}"
        try:
            return self.client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def scores(self, candidates):
        answer = self.client.post("/score", json={"candidates": candidates}, timeout=120)
        assert answer.status_code == 200, answer.text
        return [one["score"] for one in answer.json()["scores"]]

    def is_scoring(self):
        lines = self.client.get("/metrics").text.splitlines()
        (running,) = [
            line for line in lines if line.startswith("tevatron_scorer_num_requests_running ")
        ]
        return float(running.split()[1]) > 0

    def engine_processes(self):
        """Return the pids of all that the server started, down to the workers."""
        found, known = [], {self.process.pid}
        for pid, parent in _processes():
            if parent in known:
                known.add(pid)
                found.append(pid)
        return found

    def errors(self):
        entries = [
            json.loads(line) for line in self.log.read_text().splitlines() if line[:1] == "{"
        ]
        return [entry["message"] for entry in entries if entry["level"] == "error"]


def _processes():
    """Return pid and parent of every process, parents first."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid=", "--sort=start_time"], capture_output=True, text=True, check=True
    )
    return [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def _server(backend, folder, log):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-P", "-m", "tevatron.eval.serve.server", "--backend", backend]
    argv += ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    environment = {key: value for key, value in os.environ.items() if key[:9] != "TEVATRON_"}
    # Engine and workers in processes of their own, as on GPUs.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with (
        running(argv, environment=environment, log=log) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        yield Server(process, client, log)


@pytest.fixture(scope="module")
def vllm_server(folder, tmp_path_factory):
    with _server("vllm", folder, tmp_path_factory.mktemp("logs") / "vllm") as server:
        yield server


def _ready(server):
    wait_for(server.is_ready, timeout_s=START_S, what="the server to be ready")
    return server


def _pairs(num_queries, depth):
    draw = random.Random(1)
    return [
        {
            "query_id": str(query),
            "docid": str(place),
            "query": f"{WORDS[query % len(WORDS)]} {query}",
            "title": draw.choice(["", "A title"]),
            "text": " ".join(draw.choices(WORDS, k=draw.randrange(1, 60))),
        }
        for query in range(num_queries)
        for place in range(depth)
    ]


def test_both_engines_give_the_same_order(vllm_server, folder, tmp_path):
    pairs = _pairs(10, 30)
    with _server("hf", folder, tmp_path / "hf") as hf:
        expected = _ready(hf).scores(pairs)
    scores = _ready(vllm_server).scores(pairs)
    assert scores == pytest.approx(expected, abs=1e-4)
    for start in range(0, len(pairs), 30):
        places = range(start, start + 30)
        assert sorted(places, key=scores.__getitem__) == sorted(places, key=expected.__getitem__)


def test_the_contract_is_proved(vllm_server):
    info = _ready(vllm_server).client.get("/info").json()
    assert info["backend"] == "vllm"
    assert info["dtype"] == "float32"
    assert 0 <= info["max_probe_difference"] < 1e-4
    assert set(info["versions"]) == {"vllm", "torch", "device"}


def test_it_ends_with_its_processes_once_all_have_their_scores(vllm_server):
    """Ctrl-C at a terminal reaches the server's whole group, and so does `timeout`."""
    processes = _ready(vllm_server).engine_processes()
    assert len(processes) >= 2
    server = vllm_server.process.pid
    group = [pid for pid in (server, *processes) if os.getpgid(pid) == os.getpgid(server)]
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(vllm_server.scores, _pairs(40, 50))
        wait_for(lambda: vllm_server.is_scoring(), what="the request to be scored")
        for pid in group:
            os.kill(pid, signal.SIGINT)
        assert len(asked.result(60)) == 2000
    assert vllm_server.process.wait(60) == 0
    assert vllm_server.errors() == []
    wait_for(lambda: not any(map(_is_alive, processes)), what="vLLM's processes to end")


@pytest.mark.parametrize("killed", [pytest.param("server", marks=pytest.mark.full), "engine"])
def test_none_outlives_the_other(folder, tmp_path, killed):
    with _server("vllm", folder, tmp_path / "log") as server:
        processes = _ready(server).engine_processes()
        os.kill(server.process.pid if killed == "server" else processes[-1], signal.SIGKILL)
        status = server.process.wait(60)
        wait_for(lambda: not any(map(_is_alive, processes)), what="vLLM's processes to end")
    assert status == (-signal.SIGKILL if killed == "server" else 1)
    if killed == "engine":
        assert "a process of vLLM ended: EngineCore" in server.errors()[-1]
