"""Places that a user gives: what really lies under a configured root, or the hub. Knows nothing of what is registered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tevatron.core.errors import ForbiddenError, InputError
from tevatron.core.settings import Settings


def resolve_under(path: str, roots: Sequence[Path], *, variable: str) -> Path:
    """Return the real path, links followed; refuse one outside `roots` before saying whether it exists."""
    if not roots:
        raise InputError(f"no path can be registered here: {variable} is not set")
    given = Path(path)
    if not given.is_absolute():
        raise InputError(f"path: expected an absolute path, got {path!r}")
    try:
        real = given.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError
        raise InputError(f"path: {path!r} cannot be followed") from error
    if not is_under(real, roots):
        listed = ", ".join(str(root) for root in roots)
        raise InputError(f"path: expected a path under {listed}, got {path!r}")
    try:
        exists = real.exists()
    except OSError as error:
        raise InputError(f"path: {path!r} cannot be read: {error.strerror}") from error
    if not exists:
        raise InputError(f"path: {path!r} does not exist")
    return real


def check_hub_allowed(settings: Settings) -> None:
    """Refuse a hub id where the operator does not allow the hub."""
    if not settings.allow_hub:
        raise ForbiddenError(
            "hub_id: the operator does not allow the hub here (TEVATRON_ALLOW_HUB, tevatron up --allow-hub)"
        )


def is_under(real: Path, roots: Sequence[Path]) -> bool:
    """Say whether a resolved path lies under a root, or is one."""
    return any(real.is_relative_to(root.resolve()) for root in roots)


def refuse_leaving_links(folder: Path, roots: Sequence[Path]) -> None:
    """Refuse a folder with a link inside that points out of the roots."""
    for entry in folder.rglob("*"):
        try:
            leaves = entry.is_symlink() and not is_under(entry.resolve(), roots)
        except RuntimeError as error:
            raise InputError(f"{folder.name}: {entry.name} is a link to itself") from error
        if leaves:
            raise InputError(
                f"{folder.name}: {entry.name} is a link that leaves the configured roots"
            )
