"""What `tevatron run` registers: what is not there yet, by the API's own rule of names."""

import pytest
from tests.core.cli.test_client import client, server  # noqa: F401  fixtures

from tevatron.core.cli.submit import register
from tevatron.core.contracts.resources import DatasetRequest, ModelRequest
from tevatron.core.errors import ConflictError

MODEL = {
    "id": "model_1",
    "name": "base",
    "path": "/models/base",
    "hub_id": None,
    "revision": None,
    "sha256": "0",
    "created_at": "2026-01-01T00:00:00Z",
}
HUB = {"hub_id": "owner/rows", "revision": "v1", "file": "train.jsonl"}
DATASET = {
    "id": "ds_1",
    "name": "rows",
    "kind": "training",
    "state": "ready",
    "path": "datasets/ds_1/content",
    **HUB,
    "url": None,
    "sha256": "0",
    "stats": {},
    "created_at": "2026-01-01T00:00:00Z",
}


def test_what_is_there_is_not_registered_again(server, client):  # noqa: F811
    server.answers = [(200, {}, MODEL), (200, {}, DATASET)]
    models = [ModelRequest(name="base", path="/models/base")]
    register(client, models=models, datasets=[DatasetRequest(name="rows", kind="training", **HUB)])
    asked = [(method, path) for method, path, _, _ in server.requests]
    assert asked == [("GET", "/v1/models/base"), ("GET", "/v1/datasets/rows")]


def test_one_that_was_fetched_from_the_same_url_is_there(server, client):  # noqa: F811
    url = {"hub_id": None, "revision": None, "file": None, "url": "s3://team/rows.jsonl"}
    server.answers = [(200, {}, {**DATASET, **url})]
    same = DatasetRequest(name="rows", kind="training", url="s3://team/rows.jsonl")
    register(client, models=[], datasets=[same])
    server.answers = [(200, {}, {**DATASET, **url})]
    other = DatasetRequest(name="rows", kind="training", url="s3://team/other.jsonl")
    with pytest.raises(ConflictError, match=r"is another one: s3://team/rows\.jsonl"):
        register(client, models=[], datasets=[other])


def test_what_is_not_there_is_registered(server, client):  # noqa: F811
    server.answers = [(404, {}, {"detail": "unknown dataset 'rows'"}), (201, {}, DATASET)]
    register(client, models=[], datasets=[DatasetRequest(name="rows", kind="training", **HUB)])
    assert server.requests[1][0] == "POST"
    assert server.requests[1][3] == {"name": "rows", "kind": "training", **HUB}


@pytest.mark.parametrize("other", [{"revision": "v2"}, {"file": "dev.jsonl"}])
def test_another_thing_of_that_name_is_an_error(server, client, other):  # noqa: F811
    server.answers = [(200, {}, DATASET)]
    request = DatasetRequest(name="rows", kind="training", **(HUB | other))
    with pytest.raises(ConflictError, match="'rows' exists and is another one: owner/rows"):
        register(client, models=[], datasets=[request])
