"""Environments beside .venv, each with the tests that run in it; `make test-megatron` and `make test-vllm` use this.

Only the standard library. An environment needs one Python version, looked for as `python3.12` and so on, then through
pyenv, then uv; where it cannot be had its tests are skipped by name. Does nothing to one that is up to date.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Environment:
    """`.venv-NAME`, made from `requirements/NAME.txt`; its tests are `tests/NAME`."""

    name: str
    python: str
    """Version that the lock is for, such as 3.12."""
    distributions: Sequence[str]
    """Folders of our own packages."""
    size: str
    """What it takes on disk, for the one who waits."""
    rare: Sequence[str] = ()
    """Packages of the lock that are not to be had everywhere."""

    @property
    def venv(self) -> Path:
        """The folder of the environment."""
        return ROOT / f".venv-{self.name}"

    @property
    def interpreter(self) -> str:
        """Its Python."""
        return str(self.venv / "bin" / "python")

    @property
    def lock(self) -> Path:
        """Its exact versions."""
        return ROOT / "requirements" / f"{self.name}.txt"

    @property
    def tests(self) -> str:
        """The folder of its tests."""
        return f"tests/{self.name}"


def run_tests(environment: Environment, arguments: Sequence[str]) -> int:
    """Set up, then run the tests with the arguments given; `--install` sets up alone."""
    python = find_python(environment.python)
    if python is None:
        version = environment.python
        return _skip(
            environment,
            f"no Python {version}: not as python{version}, not in pyenv, not through uv",
        )
    # One at a time makes this environment; others may be made meanwhile.
    lock = os.open(environment.lock, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    stamp = environment.venv / "tevatron-stamp"
    wanted = _fingerprint(environment, python)
    if not stamp.exists() or stamp.read_text() != wanted:
        stamp.unlink(missing_ok=True)
        missing = _install(environment, python)
        if missing is not None:
            return _skip(environment, missing)
        stamp.write_text(wanted)
    fcntl.flock(lock, fcntl.LOCK_UN)
    if list(arguments) == ["--install"]:
        return 0
    return _run(
        [
            *(environment.interpreter, "-m", "pytest", environment.tests),
            # The fixtures of the other tests need packages that are not in this environment.
            *("--confcutdir", environment.tests, "-p", "no:cacheprovider"),
            *arguments,
        ]
    )


def find_python(version: str) -> str | None:
    """Return a Python of this version that has venv, or None."""
    candidates = [shutil.which(f"python{version}")]
    latest = _output(["pyenv", "latest", version]) or version
    for argv in (["pyenv", "prefix", latest], ["uv", "python", "find", version]):
        found = _output(argv)
        if found:
            candidates.append(found if argv[0] == "uv" else str(Path(found) / "bin" / "python"))
    for candidate in candidates:
        if candidate and _output([candidate, "-c", _QUESTION]) == version:
            return candidate
    return None


_QUESTION = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"

_BASE = "import sys, ensurepip; print(sys.base_prefix, sys.version)"


def _output(argv: list[str]) -> str:
    """Return what a command prints, empty where it fails or is not there."""
    try:
        ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""


def _install(environment: Environment, python: str) -> str | None:
    """Make the environment; return why it cannot be had here. Any other failure ends this program."""
    venv = environment.venv
    _say(f"setting up {venv.name} (some minutes and {environment.size} the first time)")
    if _output([environment.interpreter, "-c", _BASE]) != _output([python, "-c", _BASE]):
        shutil.rmtree(venv, ignore_errors=True)
    _must([python, "-m", "venv", str(venv)])
    pip = [environment.interpreter, "-m", "pip", "install", "-qq", "--no-input"]
    pip += ["--disable-pip-version-check", "--progress-bar=off", "--no-deps"]
    for line in environment.lock.read_text().splitlines():
        if line.partition("==")[0] in environment.rare and _run([*pip, line]) != 0:
            return f"pip finds no {line}, see above"
    _must([*pip, "-r", str(environment.lock)])
    packages = [part for name in environment.distributions for part in ("-e", f"./{name}")]
    _must([*pip, "--no-build-isolation", *packages])
    return None


def _fingerprint(environment: Environment, python: str) -> str:
    """Return a hash of what the environment is made from."""
    # Our own packages are installed as links to their folders: of theirs only what an installation writes down counts.
    ours = [ROOT / folder / "pyproject.toml" for folder in environment.distributions]
    made_from = b"".join(path.read_bytes() for path in (environment.lock, *ours))
    return hashlib.sha256(f"{python} {ROOT}".encode() + made_from).hexdigest()


def _skip(environment: Environment, why: str) -> int:
    print(f"tests skipped on this machine: {environment.tests} ({why})")
    return 0


def _must(argv: list[str]) -> None:
    status = _run(argv)
    if status != 0:
        _say(f"ended with status {status}: {' '.join(argv)}")
        sys.exit(status)


def _run(argv: list[str]) -> int:
    # A PYTHONPATH would leak into the build of our packages.
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(argv, cwd=ROOT, env=kept, check=False).returncode


def _say(text: str) -> None:
    sys.stderr.write(f"install: {text}\n")
