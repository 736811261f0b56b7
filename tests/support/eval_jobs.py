"""Evaluator jobs on real Postgres: submitted and worked off as a worker does, with fake scorers behind a stand-in host."""

import json
import threading
from contextlib import suppress

from sqlalchemy import select

from tevatron.core.contracts.jobs import EvalJob, EventType, JobKind
from tevatron.core.store.evaluations import EvaluationRepository
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.leases import LeaseLostError
from tevatron.core.store.models import DatasetKind, Job, JobEventRow
from tevatron.core.store.registered import DatasetRepository, ModelRepository
from tevatron.core.store.scorers import (
    beat_scorer,
    claim_next_scorer,
    reap_scorers,
    scorer_failed,
    scorer_ready,
    scorer_restarting,
    scorer_stopped,
)
from tevatron.core.worker.runner import run_next_job
from tevatron.evaluator.pool import PoolOptions
from tevatron.evaluator.tasks import make_handlers

CORPUS = {
    "d1": ("Tea", "green tea is picked in spring"),
    "d2": ("", "black tea is left to wither"),
    "d3": ("Coffee", "beans are roasted"),
    "d4": ("", "tea tea tea tea tea tea"),
    "d5": ("Milk", "milk goes into black tea and coffee"),
}
QUERIES = {"q1": "when is green tea picked", "q2": "black tea with milk", "q3": "roasted beans"}
QRELS = {"q1": {"d1": 2, "d4": 0}, "q2": {"d5": 1, "d2": 1}, "q3": {"d3": 1}}
QUICK = PoolOptions(
    first_chunk=2, max_chunk=2, slots=1, tries=1, backoff_s=0.01, poll_s=0.02, timeout_s=10
)


def write_beir(folder, *, corpus=CORPUS, queries=QUERIES, qrels=QRELS):
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(
        "".join(
            json.dumps({"_id": d, "title": t, "text": x}) + "\n" for d, (t, x) in corpus.items()
        )
    )
    (folder / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": q, "text": t}) + "\n" for q, t in queries.items())
    )
    lines = [f"{q}\t{d}\t{g}\n" for q, grades in qrels.items() for d, g in grades.items()]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return folder


class Jobs:
    """Submits eval jobs, and works them off as a worker does."""

    def __init__(self, settings, sessions):
        self.settings, self.sessions = settings, sessions
        self.stopping = False
        with sessions.begin() as session:
            self.add_dataset(
                session, "tea", DatasetKind.BEIR, write_beir(settings.data / "datasets" / "tea")
            )
            ModelRepository(session).create("m", key_id=None, path="models/m")

    def add_dataset(self, session, name, kind, path):
        relative = str(path.relative_to(self.settings.data))
        DatasetRepository(session).create(name, key_id=None, kind=kind, stats={}, path=relative)

    def add_run(self, name, text):
        path = self.settings.data / "datasets" / f"{name}.txt"
        path.write_text(text)
        with self.sessions.begin() as session:
            self.add_dataset(session, name, DatasetKind.RANKLIST, path)

    def submit(self, **spec):
        return self.submit_spec(
            EvalJob(**{"dataset": "tea", "metrics": ["ndcg@10", "recall@2", "mrr@10"]} | spec)
        )

    def submit_spec(self, spec):
        with self.sessions.begin() as session:
            return JobRepository(session).submit({"": spec}, key_id=None)[0].id

    def work(self, *, pool=QUICK):
        return run_next_job(
            [JobKind.EVAL, JobKind.ANNOTATE],
            handlers=make_handlers(pool),
            settings=self.settings,
            sessions=self.sessions,
            worker_name="test",
            should_stop=lambda: self.stopping,
        )

    def run(self, **spec):
        job_id = self.submit(**spec)
        assert self.work()
        return self.job(job_id)

    def job(self, job_id):
        with self.sessions.begin() as session:
            return session.get_one(Job, job_id)

    def cancel(self, job_id):
        with self.sessions.begin() as session:
            JobRepository(session).request_cancel(job_id, key_id=None)

    def events(self, job_id, kind):
        with self.sessions.begin() as session:
            rows = session.scalars(
                select(JobEventRow).where(JobEventRow.job_id == job_id).order_by(JobEventRow.seq)
            )
            return [row.data for row in rows if row.type is kind]

    def messages(self, job_id):
        return [data["message"] for data in self.events(job_id, EventType.LOG)]

    def evaluation(self, job_id):
        with self.sessions.begin() as session:
            found = EvaluationRepository(session).of_job(job_id)
            return found, EvaluationRepository(session).values(found.id)

    def folder(self, job_id):
        return self.settings.data / "runs" / job_id


class Host:
    """Claims scorer rows as a scorer host does, and serves them with fake scorers."""

    def __init__(self, sessions, start_scorer):
        self.sessions, self._start_scorer = sessions, start_scorer
        self.served = []
        self.prepare = lambda scorer: None
        self.fail_with = None
        self.info = {}
        self.lease_s = 30.0
        """Longer than a busy machine holds up the thread that renews it; short for a host that is to die."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self):
        self._thread.start()
        return self

    def die(self):
        """Stop all at once, as kill -9 does: rows stay as they are, connections break."""
        self._over.set()
        self._thread.join()
        for scorer in self.served:
            scorer.kill()

    def _serve(self):
        held = {}
        while not self._over.wait(0.05):
            with self.sessions.begin() as session:
                reap_scorers(session, grace_s=0.1, max_attempts=5)
                claim = claim_next_scorer(session, host="test", lease_s=self.lease_s)
            if claim is not None:
                self._begin(claim, held)
            for claim in list(held.values()):
                with suppress(LeaseLostError), self.sessions.begin() as session:
                    if beat_scorer(session, claim, self.lease_s).stop_requested:
                        scorer_stopped(session, claim)
                        del held[claim.scorer_id]

    def _begin(self, claim, held):
        if self.fail_with:
            with self.sessions.begin() as session:
                scorer_failed(session, claim, self.fail_with)
            return
        scorer = self._start_scorer(token=f"token{len(self.served)}")
        scorer.info |= self.info
        self.prepare(scorer)
        self.served.append(scorer)
        self.claim = claim
        with self.sessions.begin() as session:
            scorer_ready(session, claim, url=scorer.url, token=scorer.token, info=self.info)
        held[claim.scorer_id] = claim

    def restart_child(self):
        """The child died: another one on another port."""
        self.served[-1].kill()
        with self.sessions.begin() as session:
            scorer_restarting(session, self.claim)
        scorer = self._start_scorer(token="again")
        scorer.info |= self.info
        self.served.append(scorer)
        with self.sessions.begin() as session:
            scorer_ready(session, self.claim, url=scorer.url, token=scorer.token, info=self.info)
