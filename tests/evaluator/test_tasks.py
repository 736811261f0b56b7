"""The eval job's handler on real Postgres, with real HTTP scorers behind a stand-in for the scorer host."""

import json
import threading
import time

import pytest
from sqlalchemy import select
from tests.support.database import database_away
from tests.support.eval_jobs import CORPUS, QRELS, QUERIES, write_beir

from tevatron.core.contracts.jobs import (
    Bm25,
    EventType,
    JobState,
    Phase,
    RankList,
    Rerank,
)
from tevatron.core.formats.ranklist import read_ranklist
from tevatron.core.ids import new_id
from tevatron.core.store.evaluations import EvaluationRepository
from tevatron.core.store.models import DatasetKind, Scorer, ScorerState
from tevatron.core.store.registered import ModelRepository
from tevatron.core.store.scorers import (
    ScorerRepository,
    release_scorer,
)
from tevatron.evaluator import job_scoring

pytestmark = pytest.mark.db


@pytest.fixture
def settings(settings):
    """A lease that a busy machine does not break: what is tested here is the scorers' leases, not the jobs'."""
    return settings.model_copy(update={"lease_s": 30.0})


def reranked(depth=10, **changes):
    return Rerank(**{"model": "m", "prompt_template": "tevatron", "depth": depth} | changes)


def test_first_stage_alone_is_evaluated(jobs):
    job = jobs.run(name="bm25")
    assert (job.state, job.reason, job.message) == (JobState.SUCCEEDED, None, None)
    # q1: d1 first. q2: d5 and d2 first, in whatever order. q3: d3 alone.
    assert job.result["metrics"] == {"ndcg@10": 1.0, "recall@2": 1.0, "mrr@10": 1.0}
    assert job.result["num_queries"] == 3
    evaluation, values = jobs.evaluation(job.id)
    assert (evaluation.id, evaluation.name, evaluation.job_id) == (
        job.result["evaluation_id"],
        "bm25",
        job.id,
    )
    assert evaluation.metrics == job.result["metrics"]
    assert evaluation.num_queries == 3
    assert "ndcg@k: trec_eval ndcg_cut.k: linear gain" in evaluation.variant
    assert [value.query_id for value in values if value.metric == "mrr@10"] == ["q1", "q2", "q3"]
    assert len(values) == 9
    run = read_ranklist(jobs.folder(job.id) / "run.txt")
    assert run.keys() == QUERIES.keys()
    assert set(run["q1"]) == {"d1", "d2", "d4", "d5"}
    phases = [data["phase"] for data in jobs.events(job.id, EventType.PHASE)]
    assert phases == [Phase.PREPARING, Phase.RETRIEVING, Phase.EVALUATING]


def test_two_evaluations_of_the_same_run_have_the_same_hashes(jobs):
    first, second = (jobs.evaluation(jobs.run().id)[0] for _ in range(2))
    assert first.id != second.id
    assert (first.run_sha256, first.qrels_sha256) == (second.run_sha256, second.qrels_sha256)
    assert (jobs.settings.data / "cache" / "bm25").is_dir()


def test_run_is_evaluated_and_missing_queries_count_zero(jobs):
    jobs.add_run("mine", "q1 d4 3.0\nq1 d1 2.0\nq2 d5 0.5\nq9 d1 1.0\n")
    job = jobs.run(first_stage=RankList(dataset="mine"))
    assert job.state is JobState.SUCCEEDED
    assert job.result["metrics"]["mrr@10"] == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert job.result["num_missing_queries"] == 1
    said = " / ".join(jobs.messages(job.id))
    assert "1 queries of the run are not judged and are ignored, such as ['q9']" in said
    assert "1 of 3 judged queries have no results and count 0, such as ['q3']" in said
    _, values = jobs.evaluation(job.id)
    assert {v.query_id: v.value for v in values if v.metric == "mrr@10"} == {
        "q1": 0.5,
        "q2": 1.0,
        "q3": 0.0,
    }


def test_candidates_below_the_rerank_depth_keep_their_order(jobs, host):
    jobs.add_run("mine", "q1 d3 5\nq1 d1 4\nq1 d4 3\nq1 d5 2\nq1 d2 1\nq2 d2 1\nq3 d3 1\n")
    job = jobs.run(first_stage=RankList(dataset="mine"), rerank=reranked(depth=2))
    assert job.state is JobState.SUCCEEDED, job.message
    run = read_ranklist(jobs.folder(job.id) / "run.txt")
    assert list(run["q1"]) == ["d1", "d3", "d4", "d5", "d2"]
    assert host.served[0].num_pairs == 4
    assert job.result["first_stage_metrics"]["mrr@10"] < job.result["metrics"]["mrr@10"]
    table = (jobs.folder(job.id) / "metrics.md").read_text().splitlines()
    assert [line.split()[1] for line in table] == ["system", "--------", "ranklist", "reranked"]
    evaluation, _ = jobs.evaluation(job.id)
    assert evaluation.rerank["depth"] == 2
    assert evaluation.first_stage["metrics"] == job.result["first_stage_metrics"]
    with jobs.sessions.begin() as session:
        assert ModelRepository(session).by_id(evaluation.model_id).name == "m"
    phases = [data["phase"] for data in jobs.events(job.id, EventType.PHASE)]
    assert phases == ["preparing", "retrieving", "waiting_for_scorer", "scoring", "evaluating"]
    assert jobs.events(job.id, EventType.PROGRESS)[-1] | {"eta_s": 0} == {
        "done": 4,
        "total": 4,
        "unit": "pairs",
        "eta_s": 0,
    }


def test_scorer_is_let_go_afterwards(jobs, host):
    job = jobs.run(rerank=reranked())
    assert job.state is JobState.SUCCEEDED
    deadline = time.monotonic() + 5
    while True:
        with jobs.sessions.begin() as session:
            row = session.scalars(select(Scorer).where(Scorer.job_id == job.id)).one()
        if row.state is ScorerState.STOPPED:
            break
        assert time.monotonic() < deadline, row.state
        time.sleep(0.05)


def test_reranking_that_lowers_ndcg_is_warned_of(jobs, host):
    host.prepare = lambda scorer: scorer.worsen()
    job = jobs.run(rerank=reranked(), metrics=["recall@1"])
    assert job.state is JobState.SUCCEEDED
    warning = next(message for message in jobs.messages(job.id) if "reranking lowers" in message)
    assert warning.startswith("reranking lowers ndcg@10 from 1.0000 to 0.")
    assert list(job.result["metrics"]) == ["recall@1"]


def test_scorer_that_failed_fails_the_job_with_its_error(jobs, host):
    host.fail_with = "contract mismatch: tokenizer differs"
    job = jobs.run(rerank=reranked())
    assert (job.state, job.reason, job.phase) == (
        JobState.FAILED,
        "scorer_failed",
        "waiting_for_scorer",
    )
    assert job.message.endswith("failed: contract mismatch: tokenizer differs")


def test_scorer_that_somebody_lets_go_is_asked_for_again(jobs, make_host):
    job_id = jobs.submit(rerank=reranked())
    worker = threading.Thread(target=jobs.work)
    worker.start()
    wait_until(lambda: jobs.job(job_id).phase == "waiting_for_scorer")
    with jobs.sessions.begin() as session:
        first = session.scalars(select(Scorer.id)).one()
        release_scorer(session, first)
    make_host().start()
    worker.join(60)
    assert jobs.job(job_id).state is JobState.SUCCEEDED
    assert f"scorer {first} was let go; asking for another one" in jobs.messages(job_id)


def test_given_scorer_that_somebody_lets_go_fails_the_job(jobs, sessions, start_scorer):
    scorer = start_scorer()
    with sessions.begin() as session:
        row = ScorerRepository(session).register_external(
            scorer.url, key_id=None, name="a", token=None, engine="hf"
        )
    job_id = jobs.submit(rerank=Rerank(scorers=["a"]))
    with sessions.begin() as session:
        release_scorer(session, row.id)
    assert jobs.work()
    job = jobs.job(job_id)
    assert (job.state, job.reason) == (JobState.FAILED, "scorer_failed")
    assert "is stopped: somebody let it go while this job needed it" in job.message


def wait_until(look, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_cancel_while_waiting_for_a_scorer(jobs):
    job_id = jobs.submit(rerank=reranked())
    worker = threading.Thread(target=jobs.work)
    worker.start()
    wait_until(lambda: jobs.job(job_id).phase == "waiting_for_scorer")
    jobs.cancel(job_id)
    started = time.monotonic()
    worker.join(10)
    assert jobs.job(job_id).state is JobState.CANCELLED
    assert time.monotonic() - started < 3


def test_a_job_says_which_engine_it_waits_for(jobs, monkeypatch):
    monkeypatch.setattr("tevatron.evaluator.scorers.REMIND_S", 0.0)
    job_id = jobs.submit(rerank=reranked(engine="vllm"))
    worker = threading.Thread(target=jobs.work)
    worker.start()
    wait_until(lambda: any("still waiting" in message for message in jobs.messages(job_id)))
    jobs.cancel(job_id)
    worker.join(10)
    (message,) = {text for text in jobs.messages(job_id) if "still waiting" in text}
    assert "no host with a free place and engine 'vllm' (one with TEVATRON_VLLM_PYTHON" in message


def test_cancel_while_a_request_is_in_flight(jobs, host):
    release = threading.Event()
    host.prepare = lambda scorer: setattr(scorer, "before_answer", lambda pairs: release.wait(30))
    job_id = jobs.submit(rerank=reranked())
    worker = threading.Thread(target=jobs.work)
    worker.start()
    wait_until(lambda: host.served and host.served[0].requests)
    jobs.cancel(job_id)
    started = time.monotonic()
    worker.join(10)
    release.set()
    assert jobs.job(job_id).state is JobState.CANCELLED
    assert time.monotonic() - started < 3
    with jobs.sessions.begin() as session:
        assert EvaluationRepository(session).of_job(job_id) is None


def test_shutdown_gives_the_job_back_and_the_next_attempt_scores_only_the_rest(jobs, host):
    def stop_after_two(pairs):
        if len(host.served[0].requests) == 3:
            jobs.stopping = True
            time.sleep(0.5)

    host.prepare = lambda scorer: setattr(scorer, "before_answer", stop_after_two)
    job_id = jobs.submit(rerank=reranked())
    assert jobs.work()
    assert jobs.job(job_id).state is JobState.QUEUED
    lines = (jobs.folder(job_id) / "scores.jsonl").read_text().splitlines()
    kept = sum(len(json.loads(line)["scores"]) for line in lines)
    scorer = host.served[0]
    first, second, _cut_off = (len(request.candidates) for request in scorer.requests)
    # 4, or less where a machine is slow and chunks are smaller.
    assert kept == first + second
    scorer.before_answer = lambda pairs: None
    asked = scorer.num_pairs
    jobs.stopping = False
    assert jobs.work()
    job = jobs.job(job_id)
    assert (job.state, job.attempt) == (JobState.SUCCEEDED, 2)
    pairs = 4 + 4 + 1  # candidates of q1, q2, q3
    assert scorer.num_pairs - asked == pairs - kept
    assert f"{kept} scores of an earlier attempt are kept" in jobs.messages(job_id)
    # The same scorer row served both attempts.
    assert len(host.served) == 1


def test_scorer_that_dies_in_the_middle_and_comes_back_elsewhere_is_waited_for(jobs, host):
    def die_at_the_third(pairs):
        if len(host.served[0].requests) == 3 and len(host.served) == 1:
            host.restart_child()

    host.prepare = lambda scorer: setattr(scorer, "before_answer", die_at_the_third)
    job = jobs.run(rerank=reranked())
    assert job.state is JobState.SUCCEEDED, job.message
    _, second = host.served
    assert second.num_pairs == 9 - 4
    assert len(jobs.evaluation(job.id)[1]) == 9
    assert any("waiting for it, 4 scores are kept" in message for message in jobs.messages(job.id))


def test_scorer_that_comes_back_with_another_arithmetic_scores_everything_again(jobs, host):
    # A plain model on another host: its scores do not go into one ranking with those of the first.
    host.info = {"dtype": "bfloat16"}

    def die_at_the_third(pairs):
        if len(host.served[0].requests) == 3 and len(host.served) == 1:
            host.info = {"dtype": "float32"}
            host.restart_child()

    host.prepare = lambda scorer: setattr(scorer, "before_answer", die_at_the_third)
    job = jobs.run(rerank=reranked())
    assert job.state is JobState.SUCCEEDED, job.message
    _, second = host.served
    assert second.num_pairs == 9


def test_host_that_dies_in_the_middle_leaves_the_scorer_to_another(jobs, make_host):
    first, second = make_host(), make_host()
    third, gone = threading.Event(), threading.Event()

    def hang_at_the_third(pairs):
        if len(first.served[0].requests) == 3:
            third.set()
            gone.wait(30)

    first.prepare = lambda scorer: setattr(scorer, "before_answer", hang_at_the_third)
    first.lease_s = 1.0
    first.start()
    job_id = jobs.submit(rerank=reranked())
    worker = threading.Thread(target=jobs.work)
    worker.start()
    assert third.wait(30)
    first.die()
    gone.set()
    second.start()
    worker.join(60)
    job = jobs.job(job_id)
    assert job.state is JobState.SUCCEEDED, job.message
    # Two chunks were kept, the third one was lost on its way.
    assert second.served[0].num_pairs == 9 - 4
    phases = [data["phase"] for data in jobs.events(job_id, EventType.PHASE)]
    assert phases.count("waiting_for_scorer") >= 2


def test_database_that_is_away_for_less_than_the_lease_does_no_harm(jobs, make_host, database_url):
    job_id = jobs.submit(rerank=reranked())
    worker = threading.Thread(target=jobs.work)
    worker.start()
    wait_until(lambda: jobs.job(job_id).phase == "waiting_for_scorer")
    with database_away(database_url):
        time.sleep(1.0)
    make_host().start()
    worker.join(30)
    job = jobs.job(job_id)
    assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1), job.message


def test_scorer_that_never_answers_fails_the_job_at_last(jobs, sessions, monkeypatch):
    monkeypatch.setattr(job_scoring, "GIVE_UP_S", -59.5)  # + 2 leases of 30 s
    with sessions.begin() as session:
        ScorerRepository(session).register_external(
            "http://127.0.0.1:9", key_id=None, name="gone", token=None, engine="hf"
        )
    job = jobs.run(rerank=Rerank(scorers=["gone"]))
    assert (job.state, job.reason, job.phase) == (JobState.FAILED, "scorer_failed", "scoring")
    assert "no scorer answers: http://127.0.0.1:9: ConnectError" in job.message


def test_given_scorers_share_the_pairs_and_are_not_stopped(jobs, sessions, start_scorer):
    scorers = [start_scorer(token="a"), start_scorer(token="b")]
    for scorer in scorers:
        scorer.before_answer = lambda pairs: time.sleep(0.03)
    with sessions.begin() as session:
        for name, scorer in zip("ab", scorers, strict=True):
            ScorerRepository(session).register_external(
                scorer.url, key_id=None, name=name, token=scorer.token, engine="hf"
            )
    job = jobs.run(rerank=Rerank(scorers=["a", "b"]))
    assert job.state is JobState.SUCCEEDED, job.message
    assert sum(scorer.num_pairs for scorer in scorers) == 9
    assert all(scorer.num_pairs for scorer in scorers)
    with sessions.begin() as session:
        assert {row.state for row in session.scalars(select(Scorer))} == {ScorerState.READY}


def test_outside_scorers_that_serve_different_checkpoints_fail_the_job(
    jobs, sessions, start_scorer
):
    scorers = [start_scorer(), start_scorer()]
    scorers[1].info["contract_sha256"] = "d" * 64
    with sessions.begin() as session:
        for name, scorer in zip("ab", scorers, strict=True):
            ScorerRepository(session).register_external(
                scorer.url, key_id=None, name=name, token=None, engine="hf"
            )
    job = jobs.run(rerank=Rerank(scorers=["a", "b"]))
    assert (job.state, job.reason) == (JobState.FAILED, "scorer_failed")
    assert "the scorers' scores cannot be compared: contract_sha256 is" in job.message
    assert all(scorer.url in job.message for scorer in scorers)
    assert sum(scorer.num_pairs for scorer in scorers) == 0


def test_outside_scorer_without_a_contract_is_tried_with_the_probes(jobs, sessions, start_scorer):
    scorer = start_scorer()
    scorer.info = {"backend": "vllm", "model_name_or_path": "m", "prompt_template": "tevatron"}
    with sessions.begin() as session:
        ScorerRepository(session).register_external(
            scorer.url, key_id=None, name="a", token=None, engine="vllm"
        )
    job = jobs.run(rerank=Rerank(scorers=["a"]))
    assert job.state is JobState.SUCCEEDED, job.message
    assert scorer.requests[0].candidates[0]["query_id"] == "tevatron-probe"


def test_outside_scorer_that_refuses_the_token_fails_at_once(jobs, sessions, start_scorer):
    scorer = start_scorer(token="right")
    with sessions.begin() as session:
        ScorerRepository(session).register_external(
            scorer.url, key_id=None, name="a", token="wrong", engine="hf"
        )
    job = jobs.run(rerank=Rerank(scorers=["a"]))
    assert (job.state, job.reason) == (JobState.FAILED, "scorer_failed")
    assert "401 unknown token" in job.message


def test_spoilt_answer_fails_the_job(jobs, host):
    host.prepare = lambda scorer: scorer.answers.append((200, {}, {"scores": []}))
    job = jobs.run(rerank=reranked())
    assert (job.state, job.reason, job.phase) == (JobState.FAILED, "scorer_failed", "scoring")
    assert "gave 0 scores for 2 pairs" in job.message


def test_pair_that_a_scorer_refuses_is_a_data_error(jobs, host):
    host.prepare = lambda scorer: scorer.answers.append(
        (422, {}, {"detail": "query 'q1' alone takes 600 tokens"})
    )
    job = jobs.run(rerank=reranked())
    assert (job.state, job.reason, job.phase) == (JobState.FAILED, "data_error", "scoring")
    assert "query 'q1' alone takes 600 tokens" in job.message


def test_model_that_gives_no_number_has_a_reason_of_its_own(jobs, host):
    problem = {"code": "not_finite", "detail": "query 'q1', document 'd1' scores nan"}
    host.prepare = lambda scorer: scorer.answers.append((422, {}, problem))
    job = jobs.run(rerank=reranked())
    assert (job.state, job.reason, job.phase) == (JobState.FAILED, "not_finite", "scoring")
    assert "document 'd1' scores nan" in job.message


def test_id_that_no_scorer_takes_is_a_data_error(jobs, host):
    folder = jobs.settings.data / "datasets" / "long"
    write_beir(folder, corpus=CORPUS | {"x" * 1001: ("", "green tea")})
    with jobs.sessions.begin() as session:
        jobs.add_dataset(session, "long", DatasetKind.BEIR, folder)
    job = jobs.run(dataset="long", rerank=reranked())
    assert (job.state, job.reason) == (JobState.FAILED, "data_error")
    assert "cannot be sent to a scorer: String should have at most 1000 characters" in job.message


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ("q1 d1 1\nq1 d77 1\n", "1 of 2 candidates are not in the corpus of tea, such as ['d77']"),
        ("x d1 1\n", "no query of the run is judged: the qrels have"),
        ("q1 d1 nan\n", "the score of document 'd1' of query 'q1' is NaN"),
        ("q1 d1 1\nq1 d1 2\n", "document 'd1' is given twice"),
    ],
)
def test_run_that_cannot_be_reranked_says_why(jobs, run, says):
    jobs.add_run("mine", run)
    job = jobs.run(first_stage=RankList(dataset="mine"), rerank=reranked())
    assert (job.state, job.reason) == (JobState.FAILED, "data_error")
    assert says in job.message


def test_queries_without_text_or_words_are_told_and_count_zero(jobs):
    folder = jobs.settings.data / "datasets" / "odd"
    queries = QUERIES | {"q4": "   ", "q5": "zebra"}
    write_beir(
        folder, queries=queries, qrels=QRELS | {"q4": {"d1": 1}, "q5": {"d1": 1}, "q6": {"d99": 1}}
    )
    with jobs.sessions.begin() as session:
        jobs.add_dataset(session, "odd", DatasetKind.BEIR, folder)
    job = jobs.run(dataset="odd", first_stage=Bm25(depth=10))
    assert job.state is JobState.SUCCEEDED
    assert job.result["metrics"]["ndcg@10"] == pytest.approx(3 / 6)
    said = " / ".join(jobs.messages(job.id))
    assert "2 judged queries have no text, such as ['q4', 'q6']" in said
    assert "1 queries share no word with the corpus and get no documents, such as ['q5']" in said
    assert "1 documents that are judged relevant are not in the corpus, such as ['d99']" in said


def test_unknown_split_lists_what_there_is(jobs):
    job = jobs.run(split="dev")
    assert (job.state, job.reason) == (JobState.FAILED, "data_error")
    assert "unknown split 'dev'; there are: test" in job.message


def test_a_scorers_row_of_an_earlier_attempt_is_found_again(jobs, sessions):
    job_id = jobs.submit(rerank=reranked())
    for _ in range(2):
        jobs.stopping = False
        worker = threading.Thread(target=jobs.work)
        worker.start()
        wait_until(lambda: jobs.job(job_id).phase == "waiting_for_scorer")
        jobs.stopping = True
        worker.join(10)
        assert jobs.job(job_id).state is JobState.QUEUED
    with sessions.begin() as session:
        assert len(session.scalars(select(Scorer)).all()) == 1


def test_many_jobs_run_once_each(jobs):
    ids = [jobs.submit(first_stage=Bm25(depth=5)) for _ in range(20)]
    while jobs.work():
        pass
    found = [jobs.job(job_id) for job_id in ids]
    assert {(job.state, job.attempt) for job in found} == {(JobState.SUCCEEDED, 1)}
    assert len({job.result["evaluation_id"] for job in found}) == 20


def test_evaluation_id_follows_from_the_job(jobs):
    job = jobs.run()
    assert job.result["evaluation_id"] == "eval_" + job.id.removeprefix("job_")
    assert new_id("eval").startswith("eval_")
