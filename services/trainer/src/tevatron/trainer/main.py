"""`tevatron-trainer worker`: the process that takes train and export jobs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tevatron.core.contracts.jobs import JobKind
from tevatron.core.settings import Settings
from tevatron.core.worker.main import serve
from tevatron.core.worker.runner import Handler
from tevatron.trainer.launchers import LauncherName, get_launcher
from tevatron.trainer.tasks import Tasks

SERVICE = "trainer"


def make_handlers(settings: Settings) -> dict[JobKind, Handler]:
    """Return what this worker does for each kind of job."""
    tasks = Tasks(get_launcher(LauncherName.LOCAL)(settings))
    return {JobKind.TRAIN: tasks.train, JobKind.EXPORT: tasks.export}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="tevatron-trainer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("worker", help="take train and export jobs until SIGTERM")
    parser.parse_args(argv)
    settings = Settings.from_environment()
    return serve(SERVICE, make_handlers(settings), settings)


if __name__ == "__main__":
    sys.exit(main())
