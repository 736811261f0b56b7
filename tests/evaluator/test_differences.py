import pytest

from tevatron.core.errors import InputError
from tevatron.evaluator.differences import differences


def test_queries_won_and_lost_with_the_greatest_first():
    found = differences(
        {"a": 0.5, "b": 0.5, "c": 0.9, "d": 0.2, "e": 0.0},
        {"a": 0.6, "b": 1.0, "c": 0.1, "d": 0.2 + 1e-12, "e": 0.0},
    )
    assert [query.query_id for query in found.won] == ["b", "a"]
    assert [(query.query_id, query.delta) for query in found.lost] == [("c", pytest.approx(-0.8))]
    assert found.num_tied == 2
    assert found.summary() == "won 2 (+0.3000 on average), lost 1 (-0.8000 on average), same 2"
    assert differences({"a": 1.0}, {"a": 1.0}).summary() == "won 0, lost 0, same 1"


def test_other_queries_are_refused():
    with pytest.raises(InputError, match="only one has 'b'"):
        differences({"a": 1.0}, {"a": 1.0, "b": 0.0})
