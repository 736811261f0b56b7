import time
from pathlib import Path

from tevatron.scorer.host.child import Bound, Child

LOOPBACK = Bound(bind_host="127.0.0.1", port=0, advertised_host="127.0.0.1")


def test_the_child_gets_a_token_of_its_own_and_no_secret_of_the_host(monkeypatch):
    for name in ("TEVATRON_DATABASE_URL", "TEVATRON_SCORER_TOKEN", "PGPASSWORD", "HF_TOKEN"):
        monkeypatch.setenv(name, "canary")
    child = Child(["--backend", "hf", "--model", "m"], bound=LOOPBACK, devices="cpu")
    environment = Path(f"/proc/{child.pid}/environ").read_text()
    child.kill()
    assert "canary" not in environment
    assert f"TEVATRON_SCORER_TOKEN={child.token}\0" in environment
    assert "CUDA_VISIBLE_DEVICES=\0" in environment


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
