"""Make .venv: the locked requirements, then our five distributions. Run by `make`, with the Python it should have.

Only the standard library. Does nothing where the environment is up to date; safe to run twice at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "tevatron-stamp"
LOCK = ROOT / "requirements" / "default.txt"
DISTRIBUTIONS = [
    "core",
    "services/api",
    "services/trainer",
    "services/scorer",
    "services/evaluator",
]


def main() -> int:
    """Bring the environment up to date; the exit status is for make."""
    if sys.version_info < (3, 11):  # noqa: UP036  an older Python may run this
        return _refuse(
            f"Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}; try `make PYTHON=python3.11 ...`"
        )
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return _refuse(
            f"{sys.executable} has no venv module; on Debian and Ubuntu: apt-get install python{version}-venv"
        )
    folder = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    wanted = _fingerprint()
    return 0 if STAMP.exists() and STAMP.read_text() == wanted else _install(wanted)


def _install(wanted: str) -> int:
    _say(f"setting up .venv with Python {sys.version.split()[0]} (some minutes the first time)")
    STAMP.unlink(missing_ok=True)
    if not _same_interpreter():
        shutil.rmtree(VENV, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(VENV)])
    python = str(VENV / "bin" / "python")
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
    ]
    _run([*pip, "--no-deps", "-r", str(LOCK)])
    _run(
        [
            *pip,
            "--no-deps",
            "--no-build-isolation",
            *(part for name in DISTRIBUTIONS for part in ("-e", f"./{name}")),
        ]
    )
    if (
        subprocess.run(
            [python, "-c", "import torch"], cwd=ROOT, capture_output=True, check=False
        ).returncode
        != 0
    ):
        _say("this torch needs the CUDA libraries: installing them")
        _run(
            [
                *pip,
                next(line for line in LOCK.read_text().splitlines() if line.startswith("torch==")),
            ]
        )
    _run([python, "-m", "pip", "check", "--disable-pip-version-check"], quiet=True)
    STAMP.write_text(wanted)
    _say("set up")
    return 0


def _same_interpreter() -> bool:
    """Say whether .venv was made by this Python and works."""
    python = VENV / "bin" / "python"
    if not python.exists():
        return False
    question = "import sys, pip; print(sys.base_prefix, sys.version)"
    answer = subprocess.run([python, "-c", question], capture_output=True, text=True, check=False)
    return answer.stdout.strip() == f"{sys.base_prefix} {sys.version}"


def _fingerprint() -> str:
    """Return a hash of what the environment is made from."""
    digest = hashlib.sha256(f"{sys.base_prefix} {sys.version} {ROOT}".encode())
    for path in [LOCK, *(ROOT / name / "pyproject.toml" for name in DISTRIBUTIONS)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _run(argv: list[str], *, quiet: bool = False) -> None:
    # The user's own settings of pip stay; a PYTHONPATH would leak into the build of our packages.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    output = subprocess.PIPE if quiet else None
    ended = subprocess.run(argv, cwd=ROOT, env=environment, stdout=output, text=True, check=False)
    status = ended.returncode
    if status != 0:
        sys.stderr.write(ended.stdout or "")
        _say(f"ended with status {status}: {' '.join(argv)}")
        sys.exit(status)


def _say(text: str) -> None:
    sys.stderr.write(f"install: {text}\n")


def _refuse(text: str) -> int:
    _say(text)
    return 2


if __name__ == "__main__":
    sys.exit(main())
