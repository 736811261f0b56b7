"""The host as a process on a real Postgres: claims, children, deaths, and what the rows say meanwhile.

Three tests start the real server, with a model; those of deaths and leases start one that is up in a moment.
"""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import update
from tests.support.processes import python, running, settings_environment, wait_for
from tests.support.tiny_model import tiny_folder, tiny_tokenizer

from tevatron.core.contracts.checkpoint import (
    CheckpointContract,
    Probe,
    TemplateContract,
    answer_ids_of,
    write_contract,
)
from tevatron.core.contracts.tokenizers import tokenizer_sha256
from tevatron.core.contracts.train import Head
from tevatron.core.prompts import Renderer, get_template
from tevatron.core.store.models import Scorer
from tevatron.core.store.registered import ModelRepository
from tevatron.core.store.scorers import ScorerTarget, reap_scorers, release_scorer, request_scorer

pytestmark = pytest.mark.db

START_S = 200.0
"""A real server imports torch; on a busy machine that takes its time."""
VLLM = Path(__file__).parents[3] / ".venv-vllm"
STAND_IN = Path(__file__).parents[2] / "support" / "stand_in_server.py"
WITH_STAND_IN = """
import sys
from tevatron.scorer.host import child
child.SERVER = (sys.argv.pop(1),)
from tevatron.scorer.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


@contextmanager
def _host(settings, log, *, real=False, **changes):
    environment = {
        **os.environ,
        **settings_environment(settings.model_copy(update={"devices": "cpu", **changes})),
        "OMP_NUM_THREADS": "1",
    }
    program = ["-m", "tevatron.scorer.main"] if real else ["-c", WITH_STAND_IN, str(STAND_IN)]
    with running(python("-P", *program, "host"), environment=environment, log=log) as host:
        try:
            yield host
        finally:
            if host.poll() is None:
                host.send_signal(signal.SIGTERM)
                host.wait(60)


def _want(sessions, folder, *, replicas=1, **target):
    with sessions.begin() as session:
        models = ModelRepository(session)
        model = models.find(folder.name, key_id=None) or models.create(
            folder.name, key_id=None, path=str(folder), sha256="0" * 64
        )
        options = {"prompt_template": "tevatron", "max_length": 160, **target}
        return request_scorer(
            session,
            ScorerTarget(model_id=model.id, **options),
            key_id=None,
            replicas=replicas,
        )


def _row(sessions, scorer_id):
    with sessions() as session:
        return session.get_one(Scorer, scorer_id)


def _wait_state(sessions, scorer_id, *states, timeout_s=START_S):
    return wait_for(
        lambda: (row := _row(sessions, scorer_id)).state in states and row,
        timeout_s=timeout_s,
        what=f"{scorer_id} to be {' or '.join(states)}",
    )


def _score(row):
    body = {"candidates": [{"query_id": "1", "docid": "d", "query": "q", "text": "t"}]}
    return httpx.post(
        f"{row.url}/score", json=body, headers=_authorization(row), trust_env=False, verify=False
    )


def _info(row):
    return httpx.get(f"{row.url}/info", headers=_authorization(row), trust_env=False, verify=False)


def _authorization(row):
    return {"Authorization": f"Bearer {row.token}"}


def _children(pid):
    """Return the servers that this host has started."""
    text = subprocess.run(
        ["ps", "-ww", "--ppid", str(pid), "-o", "pid=,args="],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    return [int(line.split()[0]) for line in text.splitlines() if "--fd" in line]


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_wanted_scorer_is_served_and_let_go(settings, sessions, folder, tmp_path):
    scorer_id = _want(sessions, folder)
    log = tmp_path / "log"
    with _host(settings, log, real=True) as host:
        row = _wait_state(sessions, scorer_id, "ready")
        assert row.url.startswith("http://127.0.0.1:")
        assert (row.info["prompt_template"], row.info["max_length"]) == ("tevatron", 160)
        assert _score(row).status_code == 200
        assert httpx.get(f"{row.url}/info", trust_env=False).status_code == 401
        (child,) = _children(host.pid)
        environment = Path(f"/proc/{child}/environ").read_text()
        assert "TEVATRON_SCORER_TOKEN=" in environment
        for secret in (
            "TEVATRON_DATABASE_URL",
            "TEVATRON_BROKER_URL",
            "TEVATRON_API_KEY",
            settings.require_database(),
        ):
            assert secret not in environment
        assert row.token not in Path(f"/proc/{child}/cmdline").read_text()

        with sessions.begin() as session:
            release_scorer(session, scorer_id)
        row = _wait_state(sessions, scorer_id, "stopped", timeout_s=30)
        assert (row.url, row.token, row.error) == (None, None, None)
        assert not _is_alive(child)
        host.send_signal(signal.SIGTERM)
        assert host.wait(30) == 0


def test_a_model_that_cannot_be_served_fails_with_its_own_words(
    settings, sessions, folder, tmp_path
):
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for path in folder.iterdir():
        (wrong / path.name).symlink_to(path)
    renderer = Renderer(get_template("tevatron"), tiny_tokenizer(), max_length=160)
    contract = CheckpointContract(
        template=TemplateContract.of(renderer),
        answer_ids=answer_ids_of(renderer),
        head=Head.YES_NO,
        max_length=160,
        dtype="float32",
        base_model="tiny",
        base_model_sha256=None,
        tokenizer_sha256=tokenizer_sha256(folder),
        training_data_sha256=None,
        arguments=None,
        code_version="0",
        probes=[Probe(query="q", title="", text="t", token_ids=[1, 2], score=0.0)],
    )
    write_contract(wrong, contract)
    lost = _want(sessions, tmp_path / "gone")
    mismatch = _want(sessions, wrong)
    with _host(settings, tmp_path / "log", real=True):
        row = _wait_state(sessions, lost, "failed")
        assert "the folder of model_" in row.error
        assert "is not there" in row.error
        row = _wait_state(sessions, mismatch, "failed")
        assert (
            "probe 0 (query 'q') renders differently from token 0 on: contract [1, 2]" in row.error
        )
        assert row.url is None


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_the_vllm_engine_is_served_by_an_interpreter_of_its_own(
    settings, sessions, tmp_path, monkeypatch
):
    if not (VLLM / "tevatron-stamp").is_file():
        pytest.skip("vLLM's environment is not there: make test-vllm")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    scorer_id = _want(sessions, tiny_folder(tmp_path / "wide", "llama", head_dim=32), engine="vllm")
    python = VLLM / "bin" / "python"
    with _host(settings, tmp_path / "log", real=True, vllm_python=python) as host:
        row = _wait_state(sessions, scorer_id, "ready", timeout_s=400)
        assert row.info["backend"] == "vllm"
        assert _score(row).status_code == 200
        (child,) = _children(host.pid)
        assert Path(f"/proc/{child}/cmdline").read_text().startswith(str(python))


def test_a_killed_server_is_started_once_more_and_then_given_up(
    settings, sessions, folder, tmp_path
):
    scorer_id = _want(sessions, folder)
    with _host(settings, tmp_path / "log") as host:
        first = _wait_state(sessions, scorer_id, "ready")
        (child,) = _children(host.pid)
        os.kill(child, signal.SIGKILL)
        wait_for(lambda: _row(sessions, scorer_id).state == "starting", what="the restart")
        second = _wait_state(sessions, scorer_id, "ready")
        assert second.url != first.url
        assert second.token != first.token
        assert second.fence == first.fence
        assert _info(second).status_code == 200

        (child,) = _children(host.pid)
        os.kill(child, signal.SIGKILL)
        row = _wait_state(sessions, scorer_id, "failed", timeout_s=30)
        assert "killed by SIGKILL" in row.error
        assert _children(host.pid) == []


def test_a_killed_host_takes_its_servers_along_and_another_goes_on(
    settings, sessions, folder, tmp_path
):
    settings = settings.model_copy(update={"lease_s": 2.0})
    scorer_id = _want(sessions, folder)
    with _host(settings, tmp_path / "log") as host:
        first = _wait_state(sessions, scorer_id, "ready")
        (child,) = _children(host.pid)
        host.kill()
        wait_for(lambda: not _is_alive(child), timeout_s=10, what="the server to end with its host")

    def reap():
        with sessions.begin() as session:
            return reap_scorers(session, grace_s=0.2, max_attempts=3)

    assert wait_for(reap, timeout_s=20, what="the lease to lapse") == [scorer_id]
    assert _row(sessions, scorer_id).state == "wanted"
    with _host(settings, tmp_path / "log"):
        second = _wait_state(sessions, scorer_id, "ready")
        assert second.fence == first.fence + 1
        assert _info(second).status_code == 200


def test_sigterm_gives_the_rows_back(settings, sessions, folder, tmp_path):
    scorer_id = _want(sessions, folder)
    with _host(settings, tmp_path / "log") as host:
        _wait_state(sessions, scorer_id, "ready")
        (child,) = _children(host.pid)
        host.send_signal(signal.SIGTERM)
        assert host.wait(30) == 0
        assert not _is_alive(child)
        row = _row(sessions, scorer_id)
        assert (row.state, row.url, row.lost_attempts) == ("wanted", None, 0)


def test_a_lost_lease_ends_the_server_and_writes_nothing(settings, sessions, folder, tmp_path):
    scorer_id = _want(sessions, folder)
    with _host(settings, tmp_path / "log") as host:
        wait_for(lambda: _children(host.pid), what="the server to start")
        (child,) = _children(host.pid)
        with sessions.begin() as session:
            session.execute(
                update(Scorer).where(Scorer.id == scorer_id).values(fence=99, holder="another")
            )
        wait_for(lambda: not _is_alive(child), what="the server to end")
        row = _row(sessions, scorer_id)
        assert (row.state, row.fence, row.holder) == ("starting", 99, "another")


def test_a_host_serves_as_many_as_it_has_places(settings, sessions, folder, tmp_path):
    ids = [_want(sessions, folder) for _ in range(3)]
    with _host(settings, tmp_path / "log", scorer_slots=2) as host:
        wait_for(lambda: len(_children(host.pid)) == 2, what="two servers")
        first, second, third = (_row(sessions, scorer_id).state for scorer_id in ids)
        assert {first, second} <= {"starting", "ready"}
        assert third == "wanted"
        with sessions.begin() as session:
            release_scorer(session, ids[0])
        _wait_state(sessions, ids[0], "stopped", timeout_s=30)
        _wait_state(sessions, ids[2], "starting", "ready", timeout_s=30)


def test_a_server_that_is_not_ready_in_time_is_given_up(settings, sessions, tmp_path):
    folder = tmp_path / "never-ready"
    folder.mkdir()
    scorer_id = _want(sessions, folder)
    with _host(settings, tmp_path / "log", scorer_start_s=1.0) as host:
        row = _wait_state(sessions, scorer_id, "failed")
        assert row.error.startswith("it was not ready within 1 s: it said nothing")
        assert _children(host.pid) == []


def test_a_host_without_a_database_says_so():
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("TEVATRON_")
    }
    done = subprocess.run(
        python("-P", "-m", "tevatron.scorer.main", "host"),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "TEVATRON_DATABASE_URL is not set" in done.stderr


def test_the_host_does_not_import_torch():
    code = "import sys, tevatron.scorer.main; sys.exit(1 if {'torch', 'transformers'} & set(sys.modules) else 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
