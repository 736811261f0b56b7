import json

import pytest

from tevatron.core.contracts.scores import Candidate
from tevatron.evaluator.score_log import ScoreLog


def pair(**changes):
    return Candidate(
        **{"query_id": "q", "docid": "d", "query": "a", "title": "b", "text": "c"} | changes
    )


def test_scores_are_read_back_by_a_later_attempt(tmp_path):
    path = tmp_path / "runs" / "job" / "scores.jsonl"
    with ScoreLog(path, identity="x") as log:
        key = log.key(pair())
        log.append({key: 0.1 + 0.2})
    with ScoreLog(path, identity="x") as log:
        assert log.get(key) == 0.30000000000000004
        assert len(log) == 1


def test_key_is_made_of_identity_and_texts_only(tmp_path):
    with (
        ScoreLog(tmp_path / "s", identity="x") as log,
        ScoreLog(tmp_path / "t", identity="y") as other,
    ):
        key = log.key(pair())
        assert log.key(pair(query_id="r", docid="e")) == key
        changed = [
            log.key(pair(query="z")),
            log.key(pair(title="z")),
            log.key(pair(text="z")),
            other.key(pair()),
        ]
        # Texts do not run into one another.
        changed += [log.key(pair(title="bc", text="")), log.key(pair(title="", text="bc"))]
        assert len({key, *changed}) == 7


def test_scores_made_otherwise_are_not_found(tmp_path):
    with ScoreLog(tmp_path / "s", identity="x") as log:
        log.served_by("bfloat16")
        log.append({log.key(pair()): 1.0})
        log.served_by("float32")
        assert log.get(log.key(pair())) is None
        log.served_by("bfloat16")
        assert log.get(log.key(pair())) == 1.0


def test_torn_line_is_no_line_and_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "scores.jsonl"
    with ScoreLog(path, identity="x") as log:
        log.append({"k1": 1.0})
        log.append({"k2": 2.0})
    path.write_bytes(path.read_bytes()[:-7])
    with ScoreLog(path, identity="x") as log:
        assert (log.get("k1"), log.get("k2"), log.num_torn_lines) == (1.0, None, 1)
        log.append({"k3": 3.0})
    with ScoreLog(path, identity="x") as log:
        assert (log.get("k1"), log.get("k3"), log.num_torn_lines) == (1.0, 3.0, 1)


def test_each_append_is_on_disk_at_once(tmp_path):
    path = tmp_path / "scores.jsonl"
    with ScoreLog(path, identity="x") as log:
        log.append({"k1": 1.0})
        assert [json.loads(line) for line in path.read_text().splitlines()] == [
            {"scores": {"k1": 1.0}}
        ]


def test_no_number_that_json_lacks_is_kept(tmp_path):
    with (
        ScoreLog(tmp_path / "s", identity="x") as log,
        pytest.raises(ValueError, match="not JSON compliant"),
    ):
        log.append({"k": float("nan")})
