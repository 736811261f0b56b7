"""Which launchers there are, and which of them a job gets."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from tevatron.core.contracts import jobs
from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings
from tevatron.trainer.launchers import LAUNCHERS, LauncherName, get_launcher, make_chooser
from tevatron.trainer.launchers.local import LocalLauncher
from tevatron.trainer.launchers.slurm import SlurmLauncher


def test_registry_has_every_name_and_refuses_others() -> None:
    assert set(LAUNCHERS) == set(LauncherName)
    assert get_launcher("local") is LocalLauncher
    with pytest.raises(ConfigError, match=r"unknown launcher 'locl'.*Did you mean 'local'"):
        get_launcher("locl")


def test_a_job_can_name_each_launcher_of_the_registry() -> None:
    assert set(get_args(jobs.LauncherName)) == set(LauncherName)


def test_a_job_gets_the_deployments_launcher_unless_it_names_another_that_is_allowed(
    tmp_path: Path,
) -> None:
    choose = make_chooser(Settings(home=tmp_path, job_launchers=["slurm"]))
    assert isinstance(choose(None), LocalLauncher)
    assert isinstance(choose("local"), LocalLauncher)
    assert isinstance(choose("slurm"), SlurmLauncher)
    assert choose("slurm") is choose("slurm")


def test_a_launcher_that_is_not_allowed_is_refused_with_those_that_are() -> None:
    choose = make_chooser(Settings(launcher="slurm"))
    with pytest.raises(ConfigError, match=r"this deployment's \(slurm; .*\), got 'local'"):
        choose("local")


def test_a_wrong_setting_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"unknown launcher 'slrum'.*Did you mean 'slurm'"):
        make_chooser(Settings(launcher="slrum"))
