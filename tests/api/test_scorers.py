from __future__ import annotations

import httpx
import pytest
from tests.support.resources import make_resources

from tevatron.api.allowed import check_allowed
from tevatron.core.errors import ForbiddenError, InputError, TevatronError
from tevatron.core.store.models import Checkpoint
from tevatron.core.store.scorers import claim_next_scorer, scorer_ready

ALLOWED = "http://scorer.example:8100/v1"


def test_a_scorer_is_wanted_until_a_host_takes_it_and_let_go_by_delete(
    client: httpx.Client, sessions
):
    with sessions.begin() as session:
        ids = make_resources(session, key_id=None)
    answer = client.post(
        "/v1/scorers", json={"checkpoint": "tune", "name": "mine", "dtype": "float32"}
    )
    assert answer.status_code == 202
    scorer = answer.json()
    assert answer.headers["location"] == f"/v1/scorers/{scorer['id']}"
    assert (scorer["state"], scorer["checkpoint_id"], scorer["dtype"]) == (
        "wanted",
        ids["checkpoint"],
        "float32",
    )
    assert scorer["ttl_s"] == 300.0
    assert client.get("/v1/scorers/mine").json() == scorer
    for _ in range(2):
        answer = client.delete("/v1/scorers/mine")
        assert (answer.status_code, answer.json()["state"]) == (202, "stopped")
    served = client.delete(f"/v1/scorers/{ids['scorer']}")
    assert served.json()["state"] == "stopping"


def test_a_scorer_may_be_asked_for_with_vllm(client: httpx.Client, sessions):
    with sessions.begin() as session:
        make_resources(session, key_id=None)
    answer = client.post("/v1/scorers", json={"checkpoint": "tune", "engine": "vllm"})
    assert (answer.status_code, answer.json()["engine"]) == (202, "vllm")


def test_copies_of_one_checkpoint_are_listed_each_with_its_host(client: httpx.Client, sessions):
    with sessions.begin() as session:
        make_resources(session, key_id=None)
    ids = [client.post("/v1/scorers", json={"checkpoint": "tune"}).json()["id"] for _ in range(3)]
    for host in ("scorer@left:7", "scorer@right:8"):
        with sessions.begin() as session:
            claim_next_scorer(session, host=host, lease_s=60.0)
    listed = {row["id"]: row for row in client.get("/v1/scorers").json()["data"]}
    assert [(listed[one]["state"], listed[one]["holder"]) for one in ids] == [
        ("starting", "scorer@left:7"),
        ("starting", "scorer@right:8"),
        ("wanted", None),
    ]


def test_a_scorer_with_replicas_is_one_scorer_with_a_server_each(client: httpx.Client, sessions):
    with sessions.begin() as session:
        make_resources(session, key_id=None)
    asked = client.post("/v1/scorers", json={"checkpoint": "tune", "name": "two", "replicas": 2})
    scorer = asked.json()
    assert (scorer["state"], scorer["replicas"], scorer["ready_replicas"]) == ("wanted", 2, 0)
    with sessions.begin() as session:
        claim_next_scorer(session, host="scorer@left:7", lease_s=60.0)
        claim = claim_next_scorer(session, host="scorer@right:8", lease_s=60.0)
        scorer_ready(session, claim, url="http://right:1", token="canary", info={})
    answer = client.get("/v1/scorers/two")
    assert "canary" not in answer.text
    scorer = answer.json()
    assert [scorer[name] for name in ("state", "url", "holder", "ready_replicas")] == [
        "ready",
        "http://right:1",
        "scorer@right:8",
        1,
    ]
    assert [(server["state"], server["url"], server["holder"]) for server in scorer["servers"]] == [
        ("starting", None, "scorer@left:7"),
        ("ready", "http://right:1", "scorer@right:8"),
    ]
    listed = client.get("/v1/scorers").json()["data"]
    assert [row["name"] for row in listed] == ["two", "served"]
    assert listed[0] == scorer
    released = client.delete("/v1/scorers/two").json()
    assert (released["state"], [server["state"] for server in released["servers"]]) == (
        "stopping",
        ["stopping", "stopping"],
    )


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        (0, "greater than or equal to 1"),
        (-1, "greater than or equal to 1"),
        (65, "less than or equal to 64"),
        (10_000, "less than or equal to 64"),
        ("2", "valid integer"),
        (1.5, "valid integer"),
        (True, "valid integer"),
        (None, "valid integer"),
    ],
)
def test_a_number_of_replicas_that_cannot_be_is_refused_by_name(client, replicas, message):
    answer = client.post("/v1/scorers", json={"checkpoint": "a", "replicas": replicas})
    assert answer.status_code == 422
    assert "replicas" in answer.text
    assert message in answer.text


def test_an_outside_scorer_has_no_replicas(admin):
    answer = admin.post("/v1/scorers", json={"url": ALLOWED, "replicas": 2})
    assert answer.status_code == 422
    assert "replicas goes with checkpoint or model, got 2 and url" in answer.text


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"checkpoint": "a", "url": ALLOWED},
        {"model": "a"},
        {"checkpoint": "a", "prompt_template": "tevatron"},
        {"checkpoint": "a", "token": "x"},
        {"checkpoint": "a", "ttl_s": 0},
        {"checkpoint": "a", "engine": "exec"},
        {"checkpoint": "../a"},
    ],
)
def test_a_malformed_request_is_refused(client: httpx.Client, body: dict[str, object]):
    assert client.post("/v1/scorers", json=body).status_code == 422


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"checkpoint": "tune", "dtype": "float16"},
            "no tolerance for float16: it was proved in float32",
        ),
        (
            {"model": "base", "prompt_template": "tevatrom"},
            "unknown prompt template 'tevatrom'",
        ),
    ],
)
def test_what_no_host_could_serve_is_refused(client, sessions, body, message):
    with sessions.begin() as session:
        ids = make_resources(session, key_id=None)
        session.get_one(Checkpoint, ids["checkpoint"]).contract = {"tolerance": {"float32": 0.001}}
    answer = client.post("/v1/scorers", json=body)
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


def test_only_an_administrator_registers_an_outside_scorer(alice, bob, admin):
    body = {"name": "outside", "url": ALLOWED, "token": "canary-of-the-outside"}
    answer = alice.post("/v1/scorers", json=body)
    assert answer.status_code == 403
    answer = admin.post("/v1/scorers", json=body)
    assert answer.status_code == 202
    assert "canary" not in answer.text
    assert (answer.json()["state"], answer.json()["external"]) == ("ready", True)
    # Everybody may use it, nobody else may let it go.
    assert bob.get("/v1/scorers/outside").status_code == 200
    assert bob.delete("/v1/scorers/outside").status_code == 403
    assert admin.delete("/v1/scorers/outside").json()["state"] == "stopped"


@pytest.mark.parametrize(
    "url",
    [
        "http://scorer.example:8100/v1",
        "http://scorer.example:8100/v1/",
        "http://scorer.example:8100/v1/a/b",
        "HTTP://SCORER.example:8100/v1",
    ],
)
def test_urls_under_the_prefix_are_allowed(url: str):
    check_allowed(url, [ALLOWED])


@pytest.mark.parametrize(
    "url",
    [
        "http://scorer.example:81000/v1",
        "http://scorer.example:8100/v12",
        "http://scorer.example:8100/",
        "http://scorer.example:8100",
        "http://scorer.example/v1",
        "https://scorer.example:8100/v1",
        "http://scorer.example.evil.example:8100/v1",
        "http://evil.example:8100/v1",
        "http://scorer.example:8100@evil.example/v1",
        "http://user@scorer.example:8100/v1",
        "http://evil.example#http://scorer.example:8100/v1",
        "http://evil.example/?http://scorer.example:8100/v1",
        "http://evil.example\\@scorer.example:8100/v1",
        "http://scorer.example:8100/v1/../admin",
        "http://scorer.example:8100/v1/%2e%2e/admin",
        "http://scorer.example:8100/v1/%252e%252e/admin",
        "http://scorer.example:8100/v1/ x",
        "http://scorer.example:8100/v1/\n",
        "http://scorer.example:0/v1",
        "http://scorer.example:x/v1",
        "http://[::1:8100/v1",
        "http://169.254.169.254/v1",
        "http://[::1]:8100/v1",
        "http://2130706433:8100/v1",
        "http://127.1:8100/v1",
        "http://sc\N{CYRILLIC SMALL LETTER O}rer.example:8100/v1",
        "http:///v1",
        "//scorer.example:8100/v1",
        "ftp://scorer.example:8100/v1",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "scorer.example:8100/v1",
        "",
    ],
)
def test_any_other_url_is_refused(url: str):
    with pytest.raises(TevatronError) as caught:
        check_allowed(url, [ALLOWED])
    assert isinstance(caught.value, ForbiddenError | InputError)


def test_nothing_is_allowed_without_a_setting():
    with pytest.raises(ForbiddenError, match="TEVATRON_SCORER_ALLOW"):
        check_allowed(ALLOWED, [])
