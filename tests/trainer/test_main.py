"""The worker's process: light, and with a command line that says what it wants."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tevatron.core.errors import ConfigError
from tevatron.trainer.main import main


def test_the_worker_does_not_import_torch() -> None:
    script = (
        "import sys; import tevatron.trainer.main;"
        "print(sorted({'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert child.stdout == "[]\n"


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "worker" in capsys.readouterr().err


def test_a_missing_database_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEVATRON_DATABASE_URL", raising=False)
    with pytest.raises(ConfigError, match="TEVATRON_DATABASE_URL is not set"):
        main(["worker"])
