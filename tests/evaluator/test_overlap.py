import pytest

from tevatron.core.errors import InputError
from tevatron.evaluator.overlap import check_overlap


def test_one_judged_document_is_enough():
    check_overlap({"q": {"a": 0}, "p": {"b": 1}}, {"q": {"x": 1.0}, "p": {"b": 1.0}})


def test_queries_that_never_meet_are_named():
    with pytest.raises(InputError, match=r"2 queries such as '1', '2', the run has 1 such as 'x'$"):
        check_overlap({"1": {"a": 1}, "2": {"a": 1}}, {"x": {"a": 1.0}})
    with pytest.raises(InputError, match="the run has 0 such as none"):
        check_overlap({"1": {"a": 1}}, {})


def test_queries_written_otherwise_are_told():
    with pytest.raises(
        InputError,
        match=r"2 of them would meet without leading zeros, '\.0' and upper case, such as '7' and '007'",
    ):
        check_overlap({"Q1": {"a": 1}, "7": {"a": 1}}, {"q1.0": {"a": 1.0}, "007": {"a": 1.0}})


def test_documents_with_padded_ids_are_named():
    with pytest.raises(
        InputError,
        match=r"none of the documents .* for 1 judged queries is judged for its query: the qrels have documents such as "
        r"'31', '7', the run such as '00000007', '00000012'\. 1 of them would meet .*'7' and '00000007'",
    ):
        check_overlap({"q": {"31": 1, "7": 1}}, {"q": {"00000007": 2.0, "00000012": 1.0}})


def test_documents_of_another_version_are_named():
    with pytest.raises(
        InputError, match=r"such as 'c67482ba', the run such as '197beaca'\. Is it another version"
    ):
        check_overlap({"1": {"c67482ba": 2}}, {"1": {"197beaca": 1.0}})


def test_documents_judged_for_another_query_do_not_count():
    with pytest.raises(InputError, match="is judged for its query"):
        check_overlap({"q": {"a": 1}, "p": {"b": 1}}, {"q": {"b": 1.0}, "p": {"a": 1.0}})
