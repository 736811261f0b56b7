import random
import subprocess
import sys

from tevatron.core.formats.training import Passage, TrainingRow
from tevatron.trainer.program.data.sampling import Sampling


def row(num_negatives, num_positives=1):
    return TrainingRow(
        "q",
        "query",
        [Passage(f"p{i}") for i in range(num_positives)],
        [Passage(f"n{i}") for i in range(num_negatives)],
    )


def texts(sampling, one, *, index=0, epoch=0):
    return [passage.text for passage in sampling.group(one, index=index, epoch=epoch)]


def test_the_positive_is_first_and_the_group_has_its_size():
    group = texts(Sampling(seed=1, group_size=4), row(9))
    assert group[0] == "p0"
    assert len(group) == 4
    assert len(set(group)) == 4


def test_negatives_sweep_the_pool_over_the_epochs():
    sampling = Sampling(seed=1, group_size=4)
    seen = [name for epoch in range(3) for name in texts(sampling, row(9), epoch=epoch)[1:]]
    assert sorted(seen) == [f"n{i}" for i in range(9)]


def test_positives_take_turns_unless_the_first_is_asked_for():
    sampling = Sampling(seed=0, group_size=1)
    assert {texts(sampling, row(0, 3), epoch=epoch)[0] for epoch in range(3)} == {"p0", "p1", "p2"}
    first = Sampling(seed=0, group_size=1, first_positive=True)
    assert {texts(first, row(0, 3), epoch=epoch)[0] for epoch in range(3)} == {"p0"}


def test_the_first_negatives_on_request():
    sampling = Sampling(seed=5, group_size=3, first_negatives=True)
    assert texts(sampling, row(9), epoch=4)[1:] == ["n0", "n1"]


def test_too_few_negatives_are_all_taken_and_repeated():
    group = texts(Sampling(seed=1, group_size=6), row(2))
    assert len(group) == 6
    assert set(group[1:]) == {"n0", "n1"}


def test_the_global_generator_is_neither_used_nor_moved():
    sampling = Sampling(seed=1, group_size=8)
    random.seed(0)
    first = texts(sampling, row(3))
    before = random.getstate()
    assert texts(sampling, row(3)) == first
    assert random.getstate() == before


def test_another_process_draws_the_same():
    code = (
        "from tevatron.trainer.program.data.sampling import Sampling;"
        "print(Sampling(seed=3, group_size=2).order(8, epoch=2))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(Sampling(seed=3, group_size=2).order(8, epoch=2))


def test_the_order_changes_with_the_epoch_and_the_seed():
    sampling = Sampling(seed=3, group_size=2)
    orders = [
        sampling.order(30, epoch=0),
        sampling.order(30, epoch=1),
        Sampling(seed=4, group_size=2).order(30, epoch=0),
    ]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
