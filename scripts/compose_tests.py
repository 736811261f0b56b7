"""Build the images and run compose.yaml on the Docker engine that answers; `make test-compose` runs this.

Where none answers the tests are skipped by name. The arguments are pytest's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "default.txt"
TESTS = "tests/compose"


def main(arguments: list[str]) -> int:
    """Run the tests; the exit status is pytest's."""
    for command in (["docker", "version"], ["docker", "compose", "version"]):
        if not _works(command):
            print(f"tests skipped on this machine: {TESTS} (`{' '.join(command)}` fails)")
            return 0
    fetch_torch_for_cpu()
    pytest = [sys.executable, "-m", "pytest", TESTS, "-m", "compose", "-p", "no:cacheprovider"]
    return subprocess.run([*pytest, *arguments], cwd=ROOT, check=False).returncode


def fetch_torch_for_cpu() -> None:
    """Put torch's build for the CPU into wheels/, where pip finds one here; the images then are gigabytes smaller."""
    (pin,) = [line for line in LOCK.read_text().splitlines() if line.startswith("torch==")]
    # For the Python of the images, whatever ours is.
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-qq",
        "--no-deps",
        "--python-version=3.11",
    ]
    found = _works([*download, "--only-binary=:all:", "--dest", str(ROOT / "wheels"), f"{pin}+cpu"])
    if not found:
        print(f"pip finds no {pin}+cpu here: the images take torch from where pip finds it inside")


def _works(command: list[str]) -> bool:
    try:
        ended = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return ended.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
