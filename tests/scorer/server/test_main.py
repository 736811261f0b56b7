"""The server as a process: what it says when it cannot serve, and how it ends."""

import json
import shutil
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from tests.support.processes import running, wait_for
from tests.support.servers import free_port, server_command, server_environment
from tests.support.tiny_model import tiny_folder

SERVER = [sys.executable, "-P", "-m", "tevatron.eval.serve.server"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


def _failure(*flags):
    done = subprocess.run(
        [*SERVER, *flags],
        capture_output=True,
        text=True,
        env=server_environment(),
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    last = json.loads(done.stderr.splitlines()[-1])
    assert last["level"] == "error"
    return last["message"]


def test_a_model_that_cannot_be_served_ends_the_process_with_the_reason(folder):
    assert "say how it is prompted with --prompt_template" in _failure(
        "--backend", "hf", "--model", str(folder), "--port", "0"
    )


def test_a_port_that_is_taken_is_found_before_the_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = _failure(
            "--backend", "hf", "--model", "gone", "--host", "127.0.0.1", "--port", str(port)
        )
    assert message == f"cannot listen on 127.0.0.1:{port}: Address already in use"


def test_it_serves_with_a_token_and_ends_well_on_sigterm(folder, tmp_path):
    port = free_port()
    argv = server_command(folder, port, "--prompt_template tevatron --rerank_max_len 160")
    log = tmp_path / "log"
    with (
        running(
            argv, environment=server_environment(TEVATRON_SCORER_TOKEN="secret"), log=log
        ) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        wait_for(lambda: _ready(client, server), timeout_s=200, what="the server to be ready")
        body = {"candidates": [{"query_id": "1", "docid": "d", "query": "q", "text": "t"}]}
        assert client.post("/score", json=body).status_code == 401
        answer = client.post("/score", json=body, headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200
        assert isinstance(answer.json()["scores"][0]["score"], float)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    assert "secret" not in log.read_text()


def test_a_checkpoint_that_breaks_its_contract_is_never_ready_and_says_why(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "reranker.json").write_text("{}")
    port, log = free_port(), tmp_path / "log"
    with (
        running(server_command(broken, port), environment=server_environment(), log=log) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        refused = wait_for(
            lambda: _refusal(client, server), timeout_s=200, what="the server to refuse"
        )
        assert "reranker.json: field 'template': Field required" in refused
        assert client.get("/health").status_code == 503
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    assert "not ready: " in log.read_text()


def _refusal(client, server):
    assert server.poll() is None, "the server ended"
    try:
        problem = client.get("/ready").json()
    except httpx.TransportError:
        return None
    return problem["detail"] if problem["code"] == "contract_mismatch" else None


def test_sigterm_ends_a_server_that_still_loads(folder, tmp_path):
    port, log = free_port(), tmp_path / "log"
    argv = server_command(folder, port, "--prompt_template tevatron")
    with running(argv, environment=server_environment(), log=log) as server:
        wait_for(
            lambda: "listening on port" in log.read_text() if log.exists() else False,
            timeout_s=200,
            what="the server to listen",
        )
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def _ready(client, server):
    assert server.poll() is None, "the server ended"
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False
