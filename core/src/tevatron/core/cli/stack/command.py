"""`tevatron up`, between the command line and the supervisor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tevatron.core.cli.stack.console import Console
from tevatron.core.cli.stack.supervisor import StackOptions, Supervisor
from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings


def run_stack(
    *, home: Path | None, port: int | None, roots: Sequence[Path], allow_hub: bool
) -> int:
    """Check what was given, then supervise until a signal; returns the exit status."""
    # Not read: an embedded stack always has its own database, broker and address.
    ignored = ("DATABASE_URL", "BROKER_URL", "URL", "API_HOST", "API_PORT")
    environment = {
        key: text
        for key, text in os.environ.items()
        if key.removeprefix("TEVATRON_") not in ignored
    }
    if home is not None:
        environment["TEVATRON_HOME"] = str(home)
    settings = Settings.from_environment(environment)
    options = StackOptions(
        port=port, roots=[_root(path) for path in roots], allow_hub=allow_hub or settings.allow_hub
    )
    settings.home.mkdir(parents=True, exist_ok=True)
    settings.data.mkdir(parents=True, exist_ok=True)
    return Supervisor(settings, options, Console(settings.home / "logs")).run()


def _root(path: Path) -> Path:
    resolved = path.expanduser().resolve()
    if not resolved.is_dir():
        raise ConfigError(f"--root {path}: expected a folder, there is none at {resolved}")
    if os.pathsep in str(resolved):
        raise ConfigError(
            f"--root {resolved}: a path with '{os.pathsep}' cannot be passed on to the services"
        )
    return resolved
