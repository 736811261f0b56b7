"""Ways to start the ranks of a training job: the registry of launchers and their Protocol."""

from collections.abc import Callable
from enum import StrEnum

from tevatron.core.errors import ConfigError, unknown_name
from tevatron.core.settings import Settings
from tevatron.trainer.launchers.base import Exit, Handle, Launch, Launcher
from tevatron.trainer.launchers.local import LocalLauncher


class LauncherName(StrEnum):
    """Names of the launchers."""

    LOCAL = "local"


LAUNCHERS: dict[LauncherName, Callable[[Settings], Launcher]] = {
    LauncherName.LOCAL: LocalLauncher,
}


def get_launcher(name: str) -> Callable[[Settings], Launcher]:
    """Return the class of the launcher called `name`."""
    if name not in LAUNCHERS:
        raise ConfigError(unknown_name("launcher", name, LAUNCHERS))
    return LAUNCHERS[LauncherName(name)]


__all__ = [
    "LAUNCHERS",
    "Exit",
    "Handle",
    "Launch",
    "Launcher",
    "LauncherName",
    "get_launcher",
]
