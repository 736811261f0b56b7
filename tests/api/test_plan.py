from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest


@pytest.fixture
def registered(client: httpx.Client, model_folder: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
    }
    (model_folder / "config.json").write_text(json.dumps({**config, **sizes}))
    answer = client.post("/v1/models", json={"name": "tiny", "path": str(model_folder)})
    assert answer.status_code == 201, answer.text


@pytest.mark.usefixtures("registered")
def test_a_plan_says_what_fits_and_stores_nothing(client: httpx.Client):
    body = {"model": "tiny", "backend": "megatron", "num_gpus": 2}
    answer = client.post("/v1/jobs:plan", json=body)
    assert answer.status_code == 200, answer.text
    plan = answer.json()
    assert plan["asked"]["layout"] == "DP=2"
    assert [one["layout"] for one in plan["fitting"]] == ["DP=2", "TP=2 DP=1", "PP=2 DP=1"]
    assert client.get("/v1/jobs").json()["data"] == []


@pytest.mark.usefixtures("registered")
def test_the_backend_is_a_train_jobs_default(client: httpx.Client):
    answer = client.post("/v1/jobs:plan", json={"model": "tiny", "num_gpus": 2})
    plan = answer.json()
    assert plan["backend"] == "hf"
    assert [one["layout"] for one in plan["fitting"]] == [
        "DP=2 DDP",
        "DP=2 FSDP shard_grad_op",
        "DP=2 FSDP full_shard",
    ]


@pytest.mark.usefixtures("registered")
def test_a_layout_that_cannot_be_is_a_problem_with_the_numbers(client: httpx.Client):
    arguments = {"megatron": {"tensor_model_parallel_size": 4}}
    body = {"model": "tiny", "backend": "megatron", "num_gpus": 4, "arguments": arguments}
    answer = client.post("/v1/jobs:plan", json=body)
    assert answer.status_code == 422
    assert answer.json()["detail"] == (
        "tensor_model_parallel_size(4) must divide the model's 2 key-value heads"
    )


def test_an_unknown_model_is_not_found(client: httpx.Client):
    assert client.post("/v1/jobs:plan", json={"model": "tiny"}).status_code == 404
