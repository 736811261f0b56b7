from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from tests.support.asgi import post

from tevatron.api.app import create_app
from tevatron.core.settings import Settings


def register(client: httpx.Client, path: Path | str, name: str = "tiny") -> httpx.Response:
    return client.post("/v1/models", json={"name": name, "path": str(path)})


def test_a_model_folder_is_registered_with_its_hash(client: httpx.Client, model_folder: Path):
    answer = register(client, model_folder)
    assert answer.status_code == 201
    model = answer.json()
    assert answer.headers["location"] == f"/v1/models/{model['id']}"
    assert (model["name"], model["path"], model["hub_id"]) == ("tiny", str(model_folder), None)
    assert len(model["sha256"]) == 64
    assert client.get("/v1/models/tiny").json() == model
    assert client.get("/v1/models").json()["data"] == [model]


def test_a_name_is_registered_once(client: httpx.Client, model_folder: Path):
    register(client, model_folder)
    answer = register(client, model_folder)
    assert answer.status_code == 409
    assert answer.json()["detail"] == "a model named 'tiny' exists already"


def without(folder: Path, name: str) -> None:
    (folder / name).unlink()


def with_json(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


FAULTS = {
    "no config": (lambda f: without(f, "config.json"), "tiny/config.json: no such file"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "tiny/config.json: not JSON"),
    "deep config": (lambda f: (f / "config.json").write_text("[" * 10**5), "not JSON"),
    "config list": (lambda f: with_json(f, "config.json", []), "expected a JSON object, got list"),
    "no tokenizer": (
        lambda f: without(f, "tokenizer.json"),
        "tiny: no tokenizer; expected tokenizer.json",
    ),
    "no weights": (lambda f: without(f, "model.safetensors"), "tiny: no weights"),
    "code": (
        lambda f: with_json(f, "config.json", {"auto_map": {"AutoModel": "evil.Model"}}),
        "config.json: auto_map asks for remote code",
    ),
    "tokenizer code": (
        lambda f: with_json(
            f, "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}
        ),
        "tokenizer_config.json: auto_map asks for remote code",
    ),
    "slow tokenizer only": (
        lambda f: (f / "tokenizer.json").rename(f / "tokenizer.model"),
        "tiny: no tokenizer; expected tokenizer.json",
    ),
    "adapter": (
        lambda f: with_json(f, "adapter_config.json", {}),
        "adapter_config.json beside a model",
    ),
    "broken contract": (lambda f: with_json(f, "reranker.json", {}), "field 'template'"),
    "pickle only": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "weights only as pickle (pytorch_model.bin)",
    ),
    "missing shard": (
        lambda f: with_json(
            f, "model.safetensors.index.json", {"weight_map": {"w": "model-00001.safetensors"}}
        ),
        "shard model-00001.safetensors of model.safetensors.index.json is missing",
    ),
    "shard elsewhere": (
        lambda f: with_json(
            f, "model.safetensors.index.json", {"weight_map": {"w": "../x.safetensors"}}
        ),
        "got '../x.safetensors'",
    ),
    "pickled shard": (
        lambda f: with_json(f, "model.safetensors.index.json", {"weight_map": {"w": "x.bin"}}),
        "got 'x.bin'",
    ),
    "link out": (
        lambda f: (f / "vocab.txt").symlink_to("/etc/passwd"),
        "vocab.txt is a link that leaves",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_cannot_be_loaded_safely_is_refused(
    client: httpx.Client, model_folder: Path, fault: str
):
    damage, message = FAULTS[fault]
    damage(model_folder)
    answer = register(client, model_folder)
    assert answer.status_code == 422
    assert message in answer.json()["detail"]
    assert client.get("/v1/models").json()["data"] == []


def test_a_folder_that_the_api_may_not_read_is_told(
    client: httpx.Client, model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    # Root, who may run these tests, reads everything.
    def refuse(folder: Path) -> str:
        raise PermissionError(13, "Permission denied", str(folder / "model.safetensors"))

    monkeypatch.setattr("tevatron.api.models.endpoints.sha256_tree", refuse)
    answer = client.post("/v1/models", json={"name": "closed", "path": str(model_folder)})
    assert answer.status_code == 422
    assert answer.json()["detail"].endswith(
        "the API may not read " + str(model_folder / "model.safetensors")
    )


def test_links_within_the_roots_are_followed(
    client: httpx.Client, model_folder: Path, model_root: Path
):
    blob = model_root / "blob"
    (model_folder / "model.safetensors").rename(blob)
    (model_folder / "model.safetensors").symlink_to(blob)
    assert register(client, model_folder).status_code == 201


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/etc", "expected a path under"),
        ("/etc/passwd", "expected a path under"),
        ("/no/such/folder", "expected a path under"),
        ("{root}/../secret", "expected a path under"),
        ("{root}/tiny/../../secret", "expected a path under"),
        ("{root}2", "expected a path under"),
        ("{root}/%2e%2e/secret", "does not exist"),
        ("{root}/link", "expected a path under"),
        ("{root}/loop", "cannot be followed"),
        ("{root}/none", "does not exist"),
        ("{root}/" + "x" * 300, "cannot be read"),
        ("{root}/tiny/config.json", "expected a folder"),
        ("tiny", "expected an absolute path"),
        ("../tiny", "expected an absolute path"),
        ("file:///etc", "expected an absolute path"),
        ("~/x", "expected an absolute path"),
        ("{root}/\x00", "NUL"),
        ("/" + "x" * 5000, "at most 4096 characters"),
        ("", "at least 1 character"),
    ],
)
def test_a_path_outside_the_roots_is_refused(
    client: httpx.Client, model_folder: Path, model_root: Path, path: str, message: str
):
    secret = model_root.parent / "secret"
    model_folder.rename(secret)
    model_folder.mkdir()
    (model_folder / "config.json").write_text("{}")
    (model_root / "link").symlink_to(secret)
    (model_root / "loop").symlink_to(model_root / "loop")
    answer = register(client, path.replace("{root}", str(model_root)))
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


def test_the_hub_is_refused_unless_the_operator_allows_it(client: httpx.Client):
    body = {"name": "hub", "hub_id": "org/model", "revision": "main"}
    answer = client.post("/v1/models", json=body)
    assert answer.status_code == 403
    assert "TEVATRON_ALLOW_HUB" in answer.json()["detail"]


@pytest.fixture
def allow_hub(settings: Settings) -> Settings:
    return settings.model_copy(update={"allow_hub": True})


def test_a_hub_id_is_stored_with_its_revision(allow_hub, engine):
    body = {"name": "hub", "hub_id": "org/model", "revision": "0123abc"}
    answer = post(create_app(allow_hub, engine), "/v1/models", body)
    assert answer.status_code == 201
    assert (answer.json()["hub_id"], answer.json()["revision"]) == ("org/model", "0123abc")
    assert answer.json()["path"] is None


@pytest.mark.parametrize(
    "body",
    [
        {"name": "x"},
        {"name": "x", "path": "/a", "hub_id": "a/b", "revision": "c"},
        {"name": "x", "hub_id": "a/b"},
        {"name": "x", "path": "/a", "revision": "c"},
        {"name": "x", "hub_id": "../b", "revision": "c"},
        {"name": "x", "hub_id": "a/b/c", "revision": "c"},
        {"name": "../x", "path": "/a"},
        {"name": "x", "path": "/a", "trust_remote_code": True},
    ],
)
def test_a_malformed_registration_is_refused(client: httpx.Client, body: dict[str, object]):
    answer = client.post("/v1/models", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"]
