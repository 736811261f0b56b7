"""A state has its name only when it is whole."""

import pytest

from tevatron.core.errors import ConfigError
from tevatron.trainer.program.states import (
    begin_state,
    commit_state,
    find_state,
    list_states,
    newest_state,
)


def save(run_dir, step, *, keep=2):
    folder = begin_state(run_dir, step)
    (folder / "weights").write_text(str(step))
    return commit_state(run_dir, step, keep=keep)


def test_the_newest_whole_state_is_found(tmp_path):
    assert newest_state(tmp_path) is None
    save(tmp_path, 5)
    save(tmp_path, 10)
    assert newest_state(tmp_path) == (10, tmp_path / "states" / "step-10")
    assert (tmp_path / "states" / "step-10" / "weights").read_text() == "10"


def test_what_a_killed_save_leaves_is_not_taken_and_is_removed(tmp_path):
    save(tmp_path, 5)
    (begin_state(tmp_path, 10) / "weights").write_text("half")
    assert newest_state(tmp_path).step == 5
    save(tmp_path, 15)
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == ["step-15", "step-5"]


def test_the_last_ones_are_kept_by_number_not_by_name(tmp_path):
    for step in (8, 9, 10, 11):
        save(tmp_path, step, keep=2)
    assert [state.step for state in list_states(tmp_path)] == [10, 11]


def test_a_state_that_is_there_already_is_replaced(tmp_path):
    save(tmp_path, 5)
    folder = begin_state(tmp_path, 5)
    (folder / "weights").write_text("again")
    commit_state(tmp_path, 5, keep=2)
    assert (tmp_path / "states" / "step-5" / "weights").read_text() == "again"


def test_a_step_that_is_not_there_is_named(tmp_path):
    save(tmp_path, 5)
    assert find_state(tmp_path, None).step == 5
    assert find_state(tmp_path, 5).step == 5
    with pytest.raises(ConfigError, match="a saved state of step 7; there are: 5"):
        find_state(tmp_path, 7)
    with pytest.raises(ConfigError, match="a saved state; there are: none"):
        find_state(tmp_path / "empty", None)
