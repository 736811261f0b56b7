"""Make .venv-megatron and run the tests of the megatron backend in it; `make test-megatron` runs this.

Only the standard library. The environment needs Python 3.12, looked for as `python3.12`, then through pyenv, then uv;
where there is none the tests are skipped by name. Does nothing to an environment that is up to date.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-megatron"
STAMP = VENV / "tevatron-stamp"
LOCK = ROOT / "requirements" / "megatron.txt"
DISTRIBUTIONS = ["core", "services/trainer"]
TESTS = "tests/megatron"


def main() -> int:
    """Set up, then run the tests with the arguments given; `--install` sets up alone."""
    python = find_python()
    if python is None:
        print(
            f"tests skipped on this machine: {TESTS} (no Python 3.12: not as python3.12, not in pyenv, not through uv)"
        )
        return 0
    folder = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    wanted = _fingerprint(python)
    if not STAMP.exists() or STAMP.read_text() != wanted:
        status = _install(python, wanted)
        if status != 0:
            return status
    fcntl.flock(folder, fcntl.LOCK_UN)
    if sys.argv[1:] == ["--install"]:
        return 0
    return _run(
        [
            *(str(VENV / "bin" / "python"), "-m", "pytest", TESTS),
            # The fixtures of the other tests need packages that are not in this environment.
            *("--confcutdir", TESTS, "-p", "no:cacheprovider"),
            *sys.argv[1:],
        ]
    )


def find_python() -> str | None:
    """Return a Python 3.12 that has venv, or None."""
    candidates = [shutil.which("python3.12")]
    for argv in (["pyenv", "prefix", _pyenv_version()], ["uv", "python", "find", "3.12"]):
        found = _output(argv)
        if found:
            candidates.append(found if argv[0] == "uv" else str(Path(found) / "bin" / "python"))
    for candidate in candidates:
        if candidate and _output([candidate, "-c", _QUESTION]) == "3.12":
            return candidate
    return None


_QUESTION = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"

_BASE = "import sys, ensurepip; print(sys.base_prefix, sys.version)"


def _pyenv_version() -> str:
    return _output(["pyenv", "latest", "3.12"]) or "3.12"


def _output(argv: list[str]) -> str:
    """Return what a command prints, empty where it fails or is not there."""
    try:
        ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""


def _install(python: str, wanted: str) -> int:
    sys.stderr.write("install: setting up .venv-megatron (some minutes and 5 GB the first time)\n")
    STAMP.unlink(missing_ok=True)
    made_by = [str(VENV / "bin" / "python"), "-c", _BASE]
    if _output(made_by) != _output([python, "-c", _BASE]):
        shutil.rmtree(VENV, ignore_errors=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-input"]
    pip += ["--disable-pip-version-check", "--progress-bar=off"]
    packages = [part for name in DISTRIBUTIONS for part in ("-e", f"./{name}")]
    for argv in (
        [python, "-m", "venv", str(VENV)],
        [*pip, "--no-deps", "-r", str(LOCK)],
        [*pip, "--no-deps", "--no-build-isolation", *packages],
    ):
        status = _run(argv)
        if status != 0:
            sys.stderr.write(f"install: ended with status {status}: {' '.join(argv)}\n")
            return status
    STAMP.write_text(wanted)
    return 0


def _fingerprint(python: str) -> str:
    """Return a hash of what the environment is made from."""
    # Our own packages are installed as links to their folders: a change of theirs needs no new installation.
    return hashlib.sha256(f"{python} {ROOT}".encode() + LOCK.read_bytes()).hexdigest()


def _run(argv: list[str]) -> int:
    # A PYTHONPATH would leak into the build of our packages.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(argv, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
