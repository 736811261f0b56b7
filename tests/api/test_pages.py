"""The dashboard as a browser without JavaScript sees it: logins, forms, what is shown, and to whom."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import httpx
import pytest
from fastapi.routing import APIRoute
from tests.support.pages import Visitor
from tests.support.resources import TOKEN, make_resources
from tests.support.store import register, submit, train_job

from tevatron.api.dashboard import ROUTERS
from tevatron.api.dashboard.evaluations import sign_test
from tevatron.api.security import COOKIE
from tevatron.core.contracts.jobs import EventType, JobKind, JobState, Phase
from tevatron.core.store.claims import Claim, append_events, claim_next_job
from tevatron.core.store.evaluations import EvaluationRepository, Value
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.lifecycle import NewEvent
from tevatron.core.store.models import Dataset, Evaluation, Job
from tevatron.core.store.repository import EveryKey

EVIL = "<script>alert(1)</script>"
SHOWN = "&lt;script&gt;alert(1)&lt;/script&gt;"

PAGES = [
    "/ui/jobs",
    "/ui/jobs/{job}",
    "/ui/jobs/{job}/clone",
    "/ui/checkpoints",
    "/ui/checkpoints/{checkpoint}",
    "/ui/scorers",
    "/ui/scorers/{scorer}",
    "/ui/evaluations",
    "/ui/evaluations/{evaluation}",
    "/ui/compare?evaluation={evaluation}&baseline={evaluation}",
    "/ui/query?evaluation={evaluation}&baseline={evaluation}&query=q1",
    "/ui/new",
]
REFS = {
    "/ui/jobs/{ref}": "job",
    "/ui/jobs/{ref}/cancel": "job",
    "/ui/jobs/{ref}/resume": "job",
    "/ui/jobs/{ref}/save": "job",
    "/ui/jobs/{ref}/stop": "job",
    "/ui/jobs/{ref}/clone": "job",
    "/ui/jobs/{ref}/events": "job",
    "/ui/jobs/{ref}/log": "job",
    "/ui/checkpoints/{ref}": "checkpoint",
    "/ui/scorers/{ref}": "scorer",
    "/ui/scorers/{ref}/release": "scorer",
    "/ui/evaluations/{ref}": "evaluation",
}
"""Every page of one thing; a new one must be named here."""


def routes() -> list[tuple[str, str]]:
    """Return method and path of every page but those that a login needs."""
    return [
        (method, route.path)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and route.path.startswith("/ui/")
        if route.path != "/ui/login"
        for method in route.methods
    ]


@pytest.fixture
def visitor(server_url: str) -> Iterator[Visitor]:
    visitor = Visitor(server_url)
    yield visitor
    visitor.client.close()


@pytest.fixture
def visit_as(server_url: str, make_key) -> Iterator[Callable[[str], Visitor]]:
    visitors = []

    def visit(name: str) -> Visitor:
        visitor = Visitor(server_url)
        visitors.append(visitor)
        assert visitor.log_in(make_key(name)[1]).status_code == 303
        return visitor

    yield visit
    for visitor in visitors:
        visitor.client.close()


@pytest.fixture
def ids(sessions) -> dict[str, str]:
    """One row of everything, made without a key."""
    with sessions.begin() as session:
        return make_resources(session, key_id=None)


def owned_by(sessions, name: str) -> dict[str, str]:
    with sessions.begin() as session:
        key = next(key for key in KeyRepository(session).list_all() if key.name == name)
        return make_resources(session, key_id=key.id)


# Who may see what


def test_without_a_login_every_page_leads_to_the_login(visitor, make_key, sessions, ids):
    make_key("alice")
    walked = routes()
    assert len(walked) >= 20
    for method, path in walked:
        answer = visitor.client.request(method, path.replace("{ref}", "job_1"))
        assert answer.status_code == 303, (method, path)
        assert answer.headers["location"].startswith("/ui/login"), (method, path)
    answer = visitor.get("/ui/jobs?kind=train")
    assert answer.headers["location"] == "/ui/login?next=/ui/jobs%3Fkind%3Dtrain"


def test_another_keys_things_are_neither_shown_nor_reachable(visit_as, sessions):
    alice, bob = visit_as("alice"), visit_as("bob")
    owned = owned_by(sessions, "alice")
    walked = [(method, path) for method, path in routes() if "{ref}" in path]
    assert {path for _, path in walked} == set(REFS)
    for method, path in walked:
        target = path.replace("{ref}", owned[REFS[path]])
        answer = bob.post(target) if method == "POST" else bob.get(target)
        assert answer.status_code == 404, (method, path)
    for path in PAGES:
        mine, theirs = alice.get(path.format(**owned)), bob.get(path.format(**owned))
        assert mine.status_code == 200, path
        # The pages of lists and the form are there for everybody, and hold nothing of another key.
        assert theirs.status_code == (404 if "{" in path else 200), path
        for thing in owned.values():
            assert thing not in theirs.text or thing in path.format(**owned), (path, thing)
        assert "tune" not in theirs.text, path
    with sessions() as session:
        assert session.get_one(Job, owned["job"]).state is JobState.QUEUED


def test_a_page_of_two_evaluations_needs_both_to_be_the_keys_own(visit_as, sessions):
    visit_as("alice")
    bob = visit_as("bob")
    hers, his = owned_by(sessions, "alice")["evaluation"], owned_by(sessions, "bob")["evaluation"]
    for first, second in ((hers, his), (his, hers)):
        pair = f"evaluation={first}&baseline={second}"
        assert bob.get(f"/ui/compare?{pair}").status_code == 404
        assert bob.get(f"/ui/query?{pair}&query=q1").status_code == 404


def test_no_page_holds_a_scorers_token(visitor, ids):
    for path in PAGES:
        assert TOKEN not in visitor.get(path.format(**ids)).text, path


def test_a_key_in_the_header_opens_no_page_and_a_login_no_rest_route(client_of, make_key, visit_as):
    assert client_of(make_key("alice")[1]).get("/ui/jobs").status_code == 303
    bob = visit_as("bob")
    cookie = {"Cookie": f"{COOKIE}={bob.client.cookies[COOKIE]}"}
    for method, path in (("GET", "/v1/jobs"), ("POST", "/v1/jobs/x:cancel")):
        assert bob.client.request(method, path, headers=cookie).status_code == 401


def test_before_the_first_key_the_local_user_needs_no_login(visitor, ids):
    assert visitor.get("/ui/jobs").status_code == 200
    assert visitor.get("/ui/login").headers["location"] == "/ui/jobs"
    assert visitor.get("/ui/jobs", headers={"Host": "evil.example"}).status_code == 403


def test_the_first_address_leads_to_the_jobs(visitor):
    assert visitor.get("/").headers["location"] == "/ui/jobs"


# Logins


def test_a_login_is_a_cookie_that_scripts_and_other_sites_do_not_get(visitor, make_key):
    secret = make_key("alice")[1]
    answer = visitor.log_in(secret)
    assert answer.headers["location"] == "/ui/jobs"
    cookie = answer.headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=strict", "Path=/ui", "Max-Age=43200"):
        assert part in cookie
    assert "Secure" not in cookie
    assert secret not in cookie
    assert visitor.get("/ui/jobs").status_code == 200


def test_under_https_the_cookie_is_sent_over_https_only(visitor, make_key):
    secret = make_key("alice")[1]
    headers = {"X-Forwarded-Proto": "https"}  # uvicorn believes it of a proxy on this machine
    token = visitor.token("/ui/login")
    fields = {"csrf": token, "key": secret}
    answer = visitor.client.post("/ui/login", data=fields, headers=headers)
    assert "Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize("key", ["", "tvt_wrong", "x" * 5000, "\N{SNOWMAN}"])
def test_a_wrong_key_is_no_login(visitor, make_key, key):
    make_key("alice")
    answer = visitor.log_in(key)
    assert answer.status_code == 401
    assert "not known" in answer.text
    assert visitor.get("/ui/jobs").status_code == 303


def test_logging_out_ends_the_login_here_too(visit_as):
    alice = visit_as("alice")
    cookie = {"Cookie": f"{COOKIE}={alice.client.cookies[COOKIE]}"}
    assert alice.post("/ui/logout").headers["location"] == "/ui/login"
    assert COOKIE not in alice.client.cookies
    assert alice.client.get("/ui/jobs", headers=cookie).status_code == 303


def test_revoking_the_key_ends_the_login(visit_as, make_key, sessions):
    make_key("other")
    alice = visit_as("alice")
    with sessions.begin() as session:
        keys = KeyRepository(session)
        keys.revoke(next(key.id for key in keys.list_all() if key.name == "alice"))
    assert alice.get("/ui/jobs").status_code == 303


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/ui/jobs?kind=eval", "/ui/jobs?kind=eval"),
        ("//evil.example", "/ui/jobs"),
        ("https://evil.example/ui/jobs", "/ui/jobs"),
        ("/ui/\\evil.example", "/ui/jobs"),
        ("/ui/jobs\r\nSet-Cookie: a=b", "/ui/jobs"),
    ],
)
def test_a_login_leads_to_a_page_of_this_host_only(visitor, make_key, target, expected):
    fields = {"key": make_key("alice")[1], "next": target}
    assert visitor.post("/ui/login", fields).headers["location"] == expected


# Forms


def test_a_form_without_its_token_is_refused(visit_as, sessions):
    alice = visit_as("alice")
    owned = owned_by(sessions, "alice")
    posts = [path for method, path in routes() if method == "POST"]
    assert len(posts) == 8
    for path in [*posts, "/ui/login"]:
        target = path.replace("{ref}", owned.get(REFS.get(path, ""), ""))
        for fields in ({}, {"csrf": ""}, {"csrf": "0" * 64}, {"csrf": "\N{SNOWMAN}"}):
            answer = alice.client.post(target, data=fields)
            assert answer.status_code == 403, (path, fields)
    with sessions() as session:
        assert session.get_one(Job, owned["job"]).state is JobState.QUEUED


def test_the_token_of_another_visitor_is_refused(visit_as, sessions):
    alice, bob = visit_as("alice"), visit_as("bob")
    job = owned_by(sessions, "alice")["job"]
    answer = alice.client.post(f"/ui/jobs/{job}/cancel", data={"csrf": bob.token()})
    assert answer.status_code == 403


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_a_form_from_another_site_is_refused_even_with_the_token(visit_as, sessions, origin):
    alice = visit_as("alice")
    job = owned_by(sessions, "alice")["job"]
    fields = {"csrf": alice.token()}
    answer = alice.client.post(f"/ui/jobs/{job}/cancel", data=fields, headers={"Origin": origin})
    assert answer.status_code == 403
    own = str(alice.client.base_url).rstrip("/")
    answer = alice.client.post(f"/ui/jobs/{job}/cancel", data=fields, headers={"Origin": own})
    assert answer.status_code == 303


@pytest.mark.parametrize(
    ("content", "media_type", "status"),
    [
        (b"{}", "application/json", 415),
        (b"a=\xff", "application/x-www-form-urlencoded", 422),
        (b"&".join(b"a%d=1" % n for n in range(300)), "application/x-www-form-urlencoded", 422),
    ],
)
def test_a_body_that_is_no_form_is_refused(visitor, content, media_type, status):
    headers = {"Content-Type": media_type}
    answer = visitor.client.post("/ui/new", content=content, headers=headers)
    assert answer.status_code == status


# What a browser may do with it


def test_every_answer_forbids_foreign_content_and_framing(visitor, ids, make_key):
    paths = [path.format(**ids) for path in PAGES]
    paths += ["/ui/none", "/ui/jobs/none", "/ui/static/style.css", "/ui/static/none.css"]
    answers = [visitor.get(path) for path in paths]
    make_key("alice")
    answers += [visitor.get("/ui/jobs"), visitor.get("/ui/login")]
    for answer in answers:
        policy = dict(
            part.strip().split(" ", 1)
            for part in answer.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert visitor.get("/ui/login").headers["cache-control"] == "no-store"


def test_no_page_names_another_host_or_holds_a_script(visitor, ids):
    for path in PAGES:
        text = visitor.get(path.format(**ids)).text
        assert "http://" not in text.replace("http://127.0.0.1:9", ""), path
        assert "https://" not in text, path
        assert " style=" not in text, path
        for script in text.split("<script")[1:]:
            assert script.partition(">")[2].startswith("</script>"), path


def test_static_files_need_no_login_and_nothing_else_lies_there(visitor, make_key):
    make_key("alice")
    page = visitor.get("/ui/static/style.css")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/css; charset=utf-8")
    for path in ("/ui/static/../page.py", "/ui/static/%2e%2e/page.py", "/ui/static/"):
        assert visitor.get(path).status_code in (303, 404), path


def test_plotly_is_served_from_here_and_kept_by_the_browser(visitor, ids):
    text = visitor.get(f"/ui/jobs/{ids['job']}").text
    path = next(
        part.split('"')[0] for part in text.split('src="') if part.startswith("/ui/static/plotly")
    )
    answer = visitor.get(path)
    assert answer.headers["content-type"].startswith("text/javascript")
    assert "immutable" in answer.headers["cache-control"]
    assert b"plotly.js v" in answer.content[:200]


# What is shown


def test_markup_in_names_logs_and_texts_is_shown_as_text(visitor, ids, sessions, settings):
    with sessions.begin() as session:
        job = session.get_one(Job, ids["job"])
        job.name, job.message = f"name {EVIL}", f"message {EVIL}"
        job.spec = {**job.spec, "note": f"spec {EVIL}"}
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
        assert claim is not None
        log = NewEvent(EventType.LOG, {"level": "info", "message": f"event {EVIL}"})
        append_events(session, claim, [log])
        evaluation = session.get_one(Evaluation, ids["evaluation"])
        evaluation.name = f"evaluation {EVIL}"
        session.get_one(Dataset, ids["dataset"]).name = f"dataset {EVIL}"
        write_run(settings, evaluation.job_id)
    write_corpus(settings)
    folder = settings.data / "runs" / ids["job"]
    folder.mkdir(parents=True)
    (folder / "attempt-1.log").write_text(f"line {EVIL}\n")
    pages = {
        "/ui/jobs": ["name"],
        f"/ui/jobs/{ids['job']}": ["name", "spec", "event", "line"],
        f"/ui/jobs/{ids['job']}/clone": ["spec"],
        "/ui/evaluations": ["evaluation", "dataset"],
        f"/ui/evaluations/{ids['evaluation']}": ["evaluation", "dataset"],
        f"/ui/query?evaluation={ids['evaluation']}&query=q1": [
            "evaluation",
            "query",
            "title",
            "passage",
        ],
    }
    for path, expected in pages.items():
        answer = visitor.get(path)
        assert EVIL not in answer.text, path
        for word in expected:
            assert f"{word} {SHOWN}" in answer.text, (path, word)
    log_page = visitor.get(f"/ui/jobs/{ids['job']}/log")
    assert log_page.headers["content-type"].startswith("text/plain")
    assert log_page.headers["x-content-type-options"] == "nosniff"


def test_markup_in_what_was_asked_for_is_shown_as_text(visitor, ids):
    for path in (
        f"/ui/jobs/{EVIL}",
        f"/ui/none/{EVIL}",
        f"/ui/compare?evaluation={EVIL}&baseline=x",
        f"/ui/query?evaluation={ids['evaluation']}&query={EVIL}",
    ):
        answer = visitor.get(path)
        assert answer.status_code in (404, 422), path
        assert EVIL not in answer.text, path
    answer = visitor.post("/ui/review", {"spec": EVIL})
    assert (answer.status_code, EVIL in answer.text, SHOWN in answer.text) == (422, False, True)


def write_corpus(settings) -> None:
    folder = settings.data / "datasets" / "corpus"
    (folder / "qrels").mkdir(parents=True)
    documents = [
        {"_id": "d1", "title": f"title {EVIL}", "text": f"passage {EVIL}"},
        {"_id": "d2", "title": "", "text": "another"},
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in documents))
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q1", "text": f"query {EVIL}"}) + "\n")
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t2\n")


def write_run(settings, job_id: str, rows: str = "q1 Q0 d1 1 2.5 t\nq1 Q0 d2 2 -1.5 t\n") -> None:
    folder = settings.data / "runs" / job_id
    folder.mkdir(parents=True)
    (folder / "run.txt").write_text(rows)


def test_the_list_shows_progress_and_place_in_the_queue(visitor, sessions):
    first, second, third = submit(sessions, one=train_job(), two=train_job(), three=train_job())
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
        told = {"done": 30, "total": 120, "unit": "steps", "eta_s": 125.0}
        events = [NewEvent(EventType.PHASE, {"phase": "training"})]
        append_events(session, claim, [*events, NewEvent(EventType.PROGRESS, told)])
    text = visitor.get("/ui/jobs").text
    assert "30 of 120 steps, 2 min 5 s left" in text
    assert "next in its queue" in text
    assert "1 ahead in its queue" in text
    assert text.index(third) < text.index(second) < text.index(first)
    assert '<progress max="120" value="30"' in visitor.get(f"/ui/jobs/{first}").text


def test_a_job_that_its_keys_limit_holds_back_says_so(visit_as, sessions):
    visitor = visit_as("limited")
    with sessions.begin() as session:
        [key] = KeyRepository(session).list_all()
        KeyRepository(session).limit(key.id, max_queued=None, max_running=1)
        register(session, key_id=key.id)
        specs = {"one": train_job(), "two": train_job()}
        [_, second] = JobRepository(session).submit(specs, key_id=key.id)
        claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
    for path in ("/ui/jobs", f"/ui/jobs/{second.id}"):
        assert "held back: its key runs 1, as many as it may" in visitor.get(path).text, path


def test_progress_of_an_earlier_phase_is_not_shown(visitor, sessions):
    [job_id] = submit(sessions, one=train_job())
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
        told = {"done": 3, "total": 12, "unit": "steps", "eta_s": None}
        events = [
            NewEvent(EventType.PROGRESS, told),
            NewEvent(EventType.PHASE, {"phase": "saving"}),
        ]
        append_events(session, claim, events)
    assert "<progress" not in visitor.get(f"/ui/jobs/{job_id}").text


def test_filters_and_parts_of_the_list(visitor, sessions):
    for _ in range(60):
        submit(sessions, fit=train_job("same"))
    page = visitor.get("/ui/jobs?kind=train&state=queued&name=same").text
    assert page.count('<th scope="row">') == 50
    older = page.split('rel="next"')[0].rsplit('href="', 1)[1].split('"')[0].replace("&amp;", "&")
    assert visitor.get(f"/ui/jobs{older}").text.count('<th scope="row">') == 10
    assert "No jobs like this" in visitor.get("/ui/jobs?kind=eval").text
    for path in ("/ui/jobs?kind=none", "/ui/jobs?after=none", "/ui/jobs?name=%00"):
        assert visitor.get(path).status_code == 422, path


def test_older_events_are_a_page_of_their_own(visitor, sessions):
    [job_id] = submit(sessions, fit=train_job())
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
        lines = [NewEvent(EventType.LOG, {"level": "info", "message": f"[{n}]"}) for n in range(80)]
        append_events(session, claim, lines)
    page = visitor.get(f"/ui/jobs/{job_id}").text
    assert "[79]" in page
    assert "[29]" not in page
    older = page.split('">Older events')[0].rsplit('href="?', 1)[1].split("#")[0]
    page = visitor.get(f"/ui/jobs/{job_id}?{older}").text
    assert "[29]" in page
    assert "[30]" not in page


def test_steps_stand_in_a_table_for_who_sees_no_plot(visitor, sessions):
    [job_id] = submit(sessions, fit=train_job())
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
        step = {"step": 7, "loss": 0.69314, "learning_rate": 1e-5, "memory_bytes": 2.0 * 2**30}
        append_events(session, claim, [NewEvent(EventType.METRICS, step)])
    text = visitor.get(f"/ui/jobs/{job_id}").text
    assert '<tr><th scope="row">7</th><td>0.6931</td><td>1e-05</td>' in text
    assert "2.0 GiB" in text


def test_buttons_cancel_and_resume(visitor, ids, sessions):
    path = f"/ui/jobs/{ids['job']}"
    assert f'action="{path}/cancel"' in visitor.get(path).text
    assert visitor.post(f"{path}/cancel").headers["location"] == path
    page = visitor.get(path).text
    assert f'action="{path}/cancel"' not in page
    assert f'action="{path}/resume"' in page
    assert visitor.post(f"{path}/resume").headers["location"] == path
    with sessions() as session:
        assert session.get_one(Job, ids["job"]).state is JobState.QUEUED
    answer = visitor.post(f"{path}/resume")
    assert (answer.status_code, "only one that was cancelled or has failed" in answer.text) == (
        409,
        True,
    )


def begin_training(sessions, phase: Phase = Phase.TRAINING, **fields) -> tuple[str, Claim]:
    """Submit a train job and bring it into a phase."""
    [job_id] = submit(sessions, fit=train_job(**fields))
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
    with sessions.begin() as session:
        append_events(session, claim, [NewEvent(EventType.PHASE, {"phase": phase.value})])
    return job_id, claim


def test_buttons_save_and_stop_a_training(visitor, sessions):
    job_id, _ = begin_training(sessions)
    path = f"/ui/jobs/{job_id}"
    assert {f'action="{path}/{name}"' in visitor.get(path).text for name in ("save", "stop")} == {
        True
    }
    assert visitor.post(f"{path}/save").headers["location"] == path
    with sessions() as session:
        job = session.get_one(Job, job_id)
        assert (job.save_requested_at is None, job.stop_requested_at) == (False, None)
    assert visitor.post(f"{path}/stop").headers["location"] == path
    with sessions() as session:
        assert session.get_one(Job, job_id).stop_requested_at is not None
    page = visitor.get(path).text
    assert f'action="{path}/stop"' not in page
    assert "Asked to stop: the step that it is at is the last one" in page


def test_what_does_not_train_has_no_button_to_save_or_stop(visitor, sessions, ids):
    job_id, _ = begin_training(sessions, Phase.EXPORTING)
    for job in (job_id, ids["job"]):
        page = visitor.get(f"/ui/jobs/{job}").text
        assert "/save" not in page
        assert "/stop" not in page
    answer = visitor.post(f"/ui/jobs/{job_id}/save")
    assert (answer.status_code, "only a job that is training" in answer.text) == (409, True)


def test_the_held_out_rows_numbers_stand_in_a_table_with_the_best_marked(visitor, sessions):
    arguments = {"eval_steps": 2, "load_best_model_at_end": True}
    job_id, claim = begin_training(sessions, validation="train", arguments=arguments)
    assert "Not scored yet" in visitor.get(f"/ui/jobs/{job_id}").text
    # The best is older than the newest twenty; an equal one later is not it; step 60 is done again.
    losses = {2: 0.75, 4: 0.25, 6: 0.25, **dict.fromkeys(range(8, 61, 2), 0.5)}
    numbers = [*losses.items(), (60, 0.625)]
    with sessions.begin() as session:
        events = [
            NewEvent(EventType.METRICS, {"step": step, "eval_loss": loss, "eval_ndcg@10": 0.875})
            for step, loss in numbers
        ]
        append_events(session, claim, events)
    text = visitor.get(f"/ui/jobs/{job_id}").text
    part = text[text.index('id="validation"') : text.index('id="history"')]
    rows = re.findall(r'<tr( class="best")?><th scope="row">(\d+)</th><td>([^<]+)</td>', part)
    assert rows[0] == ("", "60", "0.625")
    assert [int(step) for _, step, _ in rows] == [*range(60, 21, -2), 4]
    assert [row for row in rows if row[0]] == [(' class="best"', "4", "0.25")]
    assert 'data-best-of="eval_loss"' in text
    # Their steps are no steps of the training.
    assert "No step yet" in text


def test_the_best_by_ndcg_is_the_highest(visitor, sessions):
    arguments = {
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "ndcg@10",
    }
    job_id, claim = begin_training(sessions, validation="train", arguments=arguments)
    with sessions.begin() as session:
        for step, ndcg in ((2, 0.5), (4, 0.75), (6, 0.25)):
            data = {"step": step, "eval_loss": 1.0 / step, "eval_ndcg@10": ndcg}
            append_events(session, claim, [NewEvent(EventType.METRICS, data)])
    text = visitor.get(f"/ui/jobs/{job_id}").text
    assert '<tr class="best"><th scope="row">4</th><td>0.25</td><td>0.75</td><td>best</td>' in text


def test_a_scorer_is_let_go_and_tells_no_load_where_it_does_not_answer(visitor, ids):
    path = f"/ui/scorers/{ids['scorer']}"
    assert "did not tell its load" in visitor.get(path).text
    assert visitor.post(f"{path}/release").headers["location"] == path
    assert "stopping" in visitor.get(path).text


def test_events_stream_to_a_login(visit_as, sessions):
    alice = visit_as("alice")
    job = owned_by(sessions, "alice")["job"]
    alice.post(f"/ui/jobs/{job}/cancel")
    headers = {"Accept": "text/event-stream"}
    answer = alice.get(f"/ui/jobs/{job}/events", headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.count("event: state") == 2


# Evaluations


@pytest.fixture
def pair(sessions, ids) -> tuple[str, str]:
    """Two evaluations over the same judgments; the second wins q2 and loses nothing."""
    with sessions.begin() as session:
        job = JobRepository(session).submit({"again": train_job()}, key_id=None)[0]
        first = session.get_one(Evaluation, ids["evaluation"])
        second = Evaluation(
            id="eval_second",
            name="tuned",
            key_id=None,
            job_id=job.id,
            dataset_id=first.dataset_id,
            split="test",
            first_stage={"kind": "bm25", "depth": 100, "metrics": {"ndcg@10": 0.5}},
            rerank={"depth": 1},
            checkpoint_id=ids["checkpoint"],
            metrics={"ndcg@10": 0.75},
            num_queries=2,
            variant="pytrec_eval, missing queries 0",
            run_sha256="5" * 64,
            qrels_sha256=first.qrels_sha256,
        )
        values = [Value("ndcg@10", "q1", 1.0), Value("ndcg@10", "q2", 0.5)]
        EvaluationRepository(session).add(second, values)
    return "eval_second", ids["evaluation"]


def test_evaluations_stand_in_one_table_with_changes_and_the_best_marked(visitor, pair):
    text = visitor.get("/ui/evaluations").text
    assert text.count("<h2") == 1
    assert '<strong class="best">0.7500</strong> <span class="up">(+0.2500)</span>' in text
    assert "<td>0.5000</td>" in text


def test_two_are_compared_query_by_query(visitor, pair):
    ours, theirs = pair
    text = visitor.get(f"/ui/compare?evaluation={ours}&baseline={theirs}").text
    assert "<td>0.7500</td><td>0.5000</td>" in text
    assert "<td>1</td><td>0</td><td>1</td><td>1</td>" in text  # won, lost, same, p
    assert "query=q2" in text
    assert "query=q1" not in text
    assert (
        visitor.get(f"/ui/compare?evaluation={ours}&baseline={theirs}&metric=map@5").status_code
        == 404
    )


def test_a_querys_passages_have_both_scores_and_say_what_was_not_scored(
    visitor, pair, sessions, settings
):
    ours, theirs = pair
    write_corpus(settings)
    with sessions() as session:
        jobs = [session.get_one(Evaluation, one).job_id for one in pair]
    write_run(settings, jobs[0], "q1 Q0 d2 1 7.25 t\nq1 Q0 d1 2 6.25 t\nq10 Q0 d9 1 3 t\n")
    write_run(settings, jobs[1])
    text = visitor.get(f"/ui/query?evaluation={ours}&baseline={theirs}&query=q1").text
    rows = text.split("<tbody>")[-1].split("</tr>")
    assert "<td>not judged</td>\n<td>1</td><td>7.2500</td><td>2</td><td>-1.5000</td>" in rows[0]
    # Below the depth that was reranked a run has scores that only keep the order.
    assert (
        "<td>2</td>\n<td>2</td><td>&ndash;</td><td>1</td><td>2.5000</td>".replace(
            "&ndash;", "\N{EN DASH}"
        )
        in rows[1]
    )
    assert "d9" not in text


def test_what_is_not_kept_is_said(visitor, pair):
    text = visitor.get(f"/ui/query?evaluation={pair[0]}&query=q1").text
    assert "The run of tuned is not kept here" in text
    assert "The data set cannot be read" in text


def test_a_corpus_too_large_to_search_is_said(visitor, pair, sessions, settings, monkeypatch):
    write_corpus(settings)
    with sessions() as session:
        write_run(settings, session.get_one(Evaluation, pair[0]).job_id)
    monkeypatch.setattr("tevatron.api.dashboard.passages.MAX_CORPUS_BYTES", 1)
    text = visitor.get(f"/ui/query?evaluation={pair[0]}&query=q1").text
    assert "Texts are not shown" in text
    assert "2.5000" in text


@pytest.mark.parametrize(
    ("won", "lost", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (6, 0, 0.03125), (1, 7, 0.0703125), (3, 3, 1.0)],
)
def test_the_sign_test_by_hand(won, lost, p):
    assert sign_test(won, lost) == pytest.approx(p, rel=1e-9)


# Submitting


@pytest.fixture
def registered(client: httpx.Client, model_folder, training_file, beir_folder) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
        "tie_word_embeddings": True,
    }
    (model_folder / "config.json").write_text(json.dumps(config))
    bodies = {
        "/v1/models": [{"name": "tiny", "path": str(model_folder)}],
        "/v1/datasets": [
            {"name": "rows", "kind": "training", "path": str(training_file)},
            {"name": "sample", "kind": "beir", "path": str(beir_folder)},
        ],
    }
    for path, sent in bodies.items():
        for body in sent:
            assert client.post(path, json=body).status_code == 201


FIELDS = {
    "name": "first",
    "model": "tiny",
    "dataset": "rows",
    "backend": "hf",
    "num_processes": "1",
    "gpu_gib": "139",
    "loss": "listnet",
    "learning_rate": "3e-5",
    "max_steps": "20",
    "more": '{"warmup_steps": 2}',
    "export": "yes",
    "export_dtype": "bfloat16",
    "eval_dataset": "sample",
    "split": "test",
    "depth": "10",
}


def spec_of(page: str) -> str:
    text = page.split('name="spec"')[1].split(">", 1)[1].split("</textarea>")[0]
    return text.replace("&#34;", '"')


def test_the_form_shows_the_plan_and_then_sends_what_it_showed(visitor, registered, sessions):
    answer = visitor.post("/ui/new", FIELDS)
    assert answer.status_code == 200
    assert "It fits" in answer.text
    with sessions() as session:
        assert JobRepository(session).list_jobs(key_id=EveryKey()).items == []
    once = answer.text.split('name="once" value="')[1].split('"')[0]
    sent = {"spec": spec_of(answer.text), "gpu_gib": "139", "once": once, "action": "send"}
    for _ in range(2):  # a second press of the button is the same submission
        assert visitor.post("/ui/review", sent).headers["location"] == "/ui/jobs"
    with sessions() as session:
        jobs = {job.name: job for job in JobRepository(session).list_jobs(key_id=EveryKey()).items}
    assert set(jobs) == {"first", "first-export", "first-eval"}
    arguments = jobs["first"].spec["arguments"]
    assert (arguments["loss"], arguments["learning_rate"], arguments["warmup_steps"]) == (
        "listnet",
        3e-5,
        2,
    )
    assert jobs["first-export"].spec["dtype"] == "bfloat16"
    assert jobs["first-eval"].spec["rerank"]["checkpoint"] == {"from": "first-export"}
    assert jobs["first-eval"].state is JobState.WAITING


def test_the_form_takes_held_out_rows(visitor, registered):
    held_out = {"validation": "rows", "eval_steps": "10", "load_best_model_at_end": "true"}
    answer = visitor.post("/ui/new", {**FIELDS, **held_out})
    assert answer.status_code == 200
    train = json.loads(spec_of(answer.text))["jobs"]["first"]
    assert train["validation"] == "rows"
    assert train["arguments"]["eval_steps"] == 10
    assert train["arguments"]["load_best_model_at_end"] is True


def test_a_plan_that_does_not_fit_is_said_before_it_is_sent(visitor, registered):
    answer = visitor.post("/ui/new", {**FIELDS, "gpu_gib": "0.1"})
    assert "It does not fit" in answer.text


@pytest.mark.parametrize(("backend", "layout"), [("hf", "DP=2 DDP"), ("megatron", "DP=2")])
def test_the_plan_is_of_the_backend_that_was_chosen(visitor, registered, backend, layout):
    answer = visitor.post("/ui/new", {**FIELDS, "backend": backend, "num_processes": "2"})
    rows = re.findall(r'<th scope="row">([^<]*DP=[^<]*)</th>', answer.text)
    assert rows[0] == f"{layout} (asked for)"
    assert len(rows) > 1
    assert layout not in rows


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"num_processes": "0"}, "num_processes"),
        ({"more": "{"}, "not JSON"),
        ({"more": "[]"}, "expected a JSON object"),
        ({"more": '{"no_such_flag": 1}'}, "no_such_flag"),
        ({"name": "a b"}, "jobs"),
        ({"validation": "rows"}, "eval_steps is 0"),
    ],
)
def test_a_mistake_in_the_form_is_named_and_the_rest_is_kept(visitor, registered, changed, message):
    answer = visitor.post("/ui/new", {**FIELDS, **changed})
    assert answer.status_code == 422
    assert message in answer.text.split('role="alert"')[1].split("</p>")[0]
    assert 'value="20"' in answer.text


def test_a_submission_that_is_refused_leaves_nothing(visitor, registered, sessions):
    spec = {"kind": "train", "model": "tiny", "dataset": "none"}
    fields = {"spec": json.dumps(spec), "once": "same", "action": "send"}
    for _ in range(2):
        answer = visitor.post("/ui/review", fields)
        assert answer.status_code == 404
        assert "unknown dataset" in answer.text
    spec["dataset"] = "rows"
    answer = visitor.post("/ui/review", {**fields, "spec": json.dumps(spec)})
    assert answer.status_code == 303


def test_a_clone_has_ids_where_the_first_one_named_its_group(visitor, sessions, ids):
    answer = visitor.get(f"/ui/jobs/{ids['job']}/clone")
    spec = json.loads(spec_of(answer.text))
    assert (spec["kind"], spec["model"], spec["name"]) == ("train", "base", "tune")
    assert "No plan" in answer.text  # this model's folder is not there
