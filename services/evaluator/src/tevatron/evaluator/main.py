"""`tevatron-evaluator worker`: the process that takes eval and annotate jobs."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from tevatron.core.settings import Settings
from tevatron.core.worker.main import serve
from tevatron.evaluator.tasks import make_handlers

SERVICE = "evaluator"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="tevatron-evaluator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("worker", help="take eval and annotate jobs until SIGTERM")
    parser.parse_args(argv)
    for noisy in ("bm25s", "httpx"):
        # The one sets itself to DEBUG, the other reports every request.
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return serve(SERVICE, make_handlers(), Settings.from_environment())


if __name__ == "__main__":
    sys.exit(main())
