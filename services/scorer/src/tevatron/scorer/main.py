"""`tevatron-scorer host` serves what rows ask for; `tevatron-scorer serve` serves one model folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tevatron.core.errors import TevatronError
from tevatron.core.settings import Settings
from tevatron.scorer.host.main import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named part."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="tevatron-scorer", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("part", choices=["host", "serve"])
    part = parser.parse_args(arguments[:1]).part
    if part == "serve":
        # torch: the host must not pay for it.
        from tevatron.scorer.server.main import main as serve_model

        return serve_model(arguments[1:])
    parser.parse_args(arguments)
    try:
        return serve(Settings.from_environment())
    except TevatronError as error:
        sys.stderr.write(f"tevatron-scorer host: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
