"""Ways to start the ranks of a training job: the registry of launchers, their Protocol, and which one a job gets."""

from collections.abc import Callable
from enum import StrEnum
from functools import cache

from tevatron.core.errors import ConfigError, unknown_name
from tevatron.core.settings import Settings
from tevatron.trainer.launchers.base import (
    AttachedHandle,
    ClusterUnreachableError,
    Environment,
    Exit,
    Handle,
    Launch,
    Launcher,
)
from tevatron.trainer.launchers.jobset import JobsetLauncher
from tevatron.trainer.launchers.local import LocalLauncher
from tevatron.trainer.launchers.slurm import SlurmLauncher


class LauncherName(StrEnum):
    """Names of the launchers."""

    LOCAL = "local"
    JOBSET = "jobset"
    SLURM = "slurm"


LAUNCHERS: dict[LauncherName, Callable[[Settings], Launcher]] = {
    LauncherName.LOCAL: LocalLauncher,
    LauncherName.JOBSET: JobsetLauncher,
    LauncherName.SLURM: SlurmLauncher,
}

ChooseLauncher = Callable[[str | None], Launcher]
"""Returns the launcher that a job names, the deployment's for None; `ConfigError` for one that jobs may not choose."""


def get_launcher(name: str) -> Callable[[Settings], Launcher]:
    """Return the class of the launcher called `name`."""
    if name not in LAUNCHERS:
        raise ConfigError(unknown_name("launcher", name, LAUNCHERS))
    return LAUNCHERS[LauncherName(name)]


def make_chooser(settings: Settings) -> ChooseLauncher:
    """Return how this deployment gives launchers to jobs; a wrong setting is an error now."""
    allowed = [settings.launcher, *settings.job_launchers]
    classes = {name: get_launcher(name) for name in allowed}

    @cache
    def choose(name: str | None) -> Launcher:
        chosen = settings.launcher if name is None else name
        if chosen not in classes:
            raise ConfigError(
                f"launcher: expected one of this deployment's ({', '.join(classes)}; TEVATRON_JOB_LAUNCHERS adds "
                f"others), got '{chosen}'"
            )
        return classes[chosen](settings)

    return choose


__all__ = [
    "LAUNCHERS",
    "AttachedHandle",
    "ChooseLauncher",
    "ClusterUnreachableError",
    "Environment",
    "Exit",
    "Handle",
    "Launch",
    "Launcher",
    "LauncherName",
    "get_launcher",
    "make_chooser",
]
