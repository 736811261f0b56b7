"""Every name that a schema offers has an implementation and a test, and the reverse."""

from pathlib import Path
from typing import get_args

from tevatron.core.contracts.jobs import EngineName
from tevatron.core.contracts.train import LossName

ROOT = Path(__file__).parents[2]


def test_every_loss_name_has_an_entry_and_the_reverse():
    from tevatron.trainer.program.losses import LOSSES

    assert set(LOSSES) == set(LossName)


def test_every_loss_has_a_file_and_a_test_file_of_its_name():
    folder = ROOT / "services/trainer/src/tevatron/trainer/program/losses"
    tests = ROOT / "tests/trainer/program/losses"
    for name in LossName:
        assert (folder / f"{name.value}.py").exists()
        assert (tests / f"test_{name.value}.py").exists()


def test_every_engine_name_has_an_entry_and_the_reverse():
    from tevatron.scorer.engines import ENGINES

    assert set(ENGINES) == set(get_args(EngineName))
