import time

import pytest

from tevatron.scorer.host.child import Bound, Child, child_environment

LOOPBACK = Bound(bind_host="127.0.0.1", port=0, advertised_host="127.0.0.1")


def test_the_environment_holds_no_secret_and_what_a_model_needs():
    environment = {
        "PATH": "/bin",
        "HOME": "/home/u",
        "HF_HOME": "/cache",
        "OMP_NUM_THREADS": "1",
        "LC_ALL": "C",
        "TEVATRON_DATABASE_URL": "postgresql+psycopg://u:p@h/d",
        "TEVATRON_BROKER_URL": "redis://h",
        "TEVATRON_API_KEY": "key",
        "TEVATRON_HOME": "/t",
        "PGPASSWORD": "p",
        "AWS_SECRET_ACCESS_KEY": "s",
        "HF_TOKEN": "t",
        "TEVATRON_SCORER_TOKEN": "another's",
    }
    assert child_environment(environment, token="mine", devices=None) == {
        "PATH": "/bin",
        "HOME": "/home/u",
        "HF_HOME": "/cache",
        "OMP_NUM_THREADS": "1",
        "LC_ALL": "C",
        "TEVATRON_SCORER_TOKEN": "mine",
        "HF_HUB_OFFLINE": "1",
    }


def test_the_hub_and_its_token_are_for_hosts_whose_operator_allows_it():
    given = {"HF_TOKEN": "t", "HF_HUB_CACHE": "/cache"}
    allowed = child_environment(given, token="mine", devices=None, allow_hub=True)
    assert allowed == {**given, "TEVATRON_SCORER_TOKEN": "mine"}


@pytest.mark.parametrize(("devices", "visible"), [("cpu", ""), ("1", "1")])
def test_a_place_sees_its_own_device_only(devices, visible):
    environment = child_environment({"CUDA_VISIBLE_DEVICES": "0,1,2"}, token="t", devices=devices)
    assert environment["CUDA_VISIBLE_DEVICES"] == visible


def _ended(child):
    deadline = time.monotonic() + 60
    while not child.has_ended():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return child.exit_status()


def test_its_last_error_line_is_kept_and_its_log_passed_on(capfd):
    child = Child(
        ["--backend", "hf", "--model", "m", "--trust_remote_code"], bound=LOOPBACK, devices="cpu"
    )
    assert _ended(child) == 1
    assert child.last_error() == (
        "--trust_remote_code is not supported: no code of a model folder is ever run (exit status 1)"
    )
    assert '"level": "error"' in capfd.readouterr().err


def test_words_that_are_no_log_lines_are_kept_too():
    child = Child(["--backend", "none"], bound=LOOPBACK, devices="cpu")
    assert _ended(child) == 2
    assert "invalid choice: 'none'" in child.last_error()


def test_a_killed_child_says_by_what():
    child = Child(["--backend", "hf", "--model", "m"], bound=LOOPBACK, devices="cpu")
    child.kill()
    assert child.exit_status() == -9
    assert child.last_error() == "it said nothing (killed by SIGKILL)"


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(monkeypatch, tmp_path):
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    monkeypatch.setattr("tevatron.scorer.host.child.SERVER", [str(stubborn)])
    child = Child([], bound=LOOPBACK, devices="cpu")
    deadline = time.monotonic() + 60
    while "up" not in child.last_words() and time.monotonic() < deadline:
        time.sleep(0.02)
    child.stop(grace_s=0.3)
    child.stop(grace_s=100)
    assert _ended(child) == -9


def test_addresses_and_tokens_are_its_own():
    one = Child(["--backend", "none"], bound=LOOPBACK, devices="cpu")
    other = Child(
        ["--backend", "none"],
        bound=Bound(bind_host="0.0.0.0", port=0, advertised_host="scorer-0.pods"),
        devices="cpu",
    )
    try:
        assert one.url == one.local_url
        assert one.url != other.url
        assert other.url.startswith("http://scorer-0.pods:")
        assert other.url.rpartition(":")[2] == other.local_url.rpartition(":")[2]
        assert one.token != other.token
        assert len(one.token) >= 40
    finally:
        one.kill()
        other.kill()
