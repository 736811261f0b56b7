from tevatron.scorer.engines.fake import FakeEngine


def test_scores_depend_on_nothing_but_the_prompt():
    scores = FakeEngine().score([[1, 2, 3], [4], [1, 2, 3]])
    assert scores[0] == scores[2] != scores[1]
    assert FakeEngine().score([[4]]) == [scores[1]]
    assert all(-10 <= score <= 10 for score in scores)
