"""From a fresh clone to a table over the published port, through kills, and still there after a restart of all."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from tests.compose.conftest import CPU_IMAGES, ROOT, Stack, wait_until

from tevatron.core.contracts.jobs import (
    FINAL_STATES,
    EvalJob,
    EventType,
    From,
    JobGroup,
    JobState,
    Rerank,
    TrainJob,
)
from tevatron.core.contracts.train import TrainArguments

SERVICES = {"postgres", "redis", "api", "dispatcher", "trainer", "scorer", "evaluator"}
MODULES = {
    # And modules out of files that were stripped.
    "api": [
        "tevatron.api.app",
        "tevatron.api.main",
        "tevatron.core.cli.main",
        "zstandard",
        "yaml._yaml",
    ],
    "evaluator": ["tevatron.evaluator.main", "tevatron.eval.run"],
    "scorer": ["tevatron.scorer.main", "tevatron.scorer.server.main"],
    "trainer": ["tevatron.trainer.main", "tevatron.reranker.driver.train"],
    "demo": ["tevatron.utils.prepare_training_data", "tevatron.core.cli.main", "gguf"],
}


def run_in(stack: Stack, image: str, *words: str) -> str:
    command = ["docker", "run", "--rm", "--read-only", "--tmpfs=/tmp", "--network=none"]
    ended = subprocess.run(
        [*command, f"tevatron/{image}:{stack.version}", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_service_is_healthy_and_one_port_is_open(stack: Stack):
    found = stack.containers()
    assert set(found) == SERVICES
    assert {entry["Health"] for entry in found.values()} == {"healthy"}
    published = {
        name: [port["PublishedPort"] for port in entry["Publishers"] if port["PublishedPort"]]
        for name, entry in found.items()
    }
    assert [name for name, ports in published.items() if ports] == ["api"]


@pytest.mark.parametrize("image", CPU_IMAGES)
def test_an_image_holds_its_modules_and_versions_of_the_lock_alone(stack: Stack, image: str):
    run_in(stack, image, "python", "-P", "-c", f"import {', '.join(MODULES[image])}")
    listed = json.loads(run_in(stack, image, "python", "-m", "pip", "list", "--format=json"))
    lock = (ROOT / "requirements" / "default.txt").read_text().lower().replace("_", "-")
    # Those of the base image, and ours.
    theirs = [one for one in listed if one["name"] not in ("pip", "setuptools", "wheel")]
    assert [
        pin
        for one in theirs
        if not one["name"].startswith(("tevatron-", "nvidia-", "cuda-", "triton"))
        and (pin := f"{one['name']}=={one['version'].partition('+')[0]}".lower().replace("_", "-"))
        not in lock
    ] == []


@pytest.mark.parametrize("image", ["trainer", "scorer"])
def test_torch_comes_out_of_the_wheel_folder(stack: Stack, image: str):
    wheels = [wheel.name for wheel in (stack.clone / "wheels").glob("torch-*.whl")]
    if not wheels:
        pytest.skip("no wheel of torch for the CPU was found on this machine")
    found = run_in(stack, image, "python", "-c", "import torch; print(torch.__version__)").strip()
    assert [name.split("-")[1] for name in wheels] == [found]


@pytest.mark.parametrize("image", CPU_IMAGES)
def test_an_image_has_no_compiler_no_left_overs_and_no_rights(stack: Stack, image: str):
    assert run_in(stack, image, "id", "-u").strip() == "10001"
    compilers = "for name in gcc cc g++ make; do ! command -v $name || exit 1; done"
    run_in(stack, image, "sh", "-c", compilers)
    left = (
        "import glob; print([p for p in ('/build', '/root/.cache/pip', '/wheels') if glob.glob(p)])"
    )
    assert run_in(stack, image, "python", "-c", left).strip() == "[]"


def test_the_demo_ends_with_its_table(demo_table: str):
    rows = [line.split() for line in demo_table.splitlines()]
    # BM25's values do not depend on the model: those of the README.
    assert ["BM25", "0.6080", "0.8333"] in [row[:3] for row in rows]
    assert {row[0] for row in rows if row} >= {"BM25", "untrained", "trained"}


@pytest.mark.usefixtures("demo_table")
def test_the_one_off_service_ends_with_the_same_table(stack: Stack):
    # What its image runs by itself, with the tiny model in place of SmolLM2.
    demo = ["python", "/examples/demo.py", "--url", "http://api:8000", "--model", "/models/tiny"]
    table = stack.compose("run", "--rm", "-T", "demo", *demo)
    rows = [line.split()[:3] for line in table.splitlines()]
    assert ["BM25", "0.6080", "0.8333"] in rows
    assert {row[0] for row in rows if row} >= {"untrained", "trained"}


@pytest.mark.usefixtures("demo_table")
def test_compose_shows_the_logs_of_workers(stack: Stack):
    for service, kinds in {"trainer": "export, train", "evaluator": "annotate, eval"}.items():
        lines = stack.compose("logs", "--no-log-prefix", service).splitlines()
        said = [json.loads(line)["message"] for line in lines if line.startswith("{")]
        assert f"waiting for jobs: {kinds}" in said
        assert any(re.fullmatch(r"job \w+: attempt 1 starts", text) for text in said)
        assert any(re.fullmatch(r"job \w+: attempt 1 finished after \d+ s", text) for text in said)


@pytest.mark.usefixtures("demo_table")
def test_a_job_survives_the_kill_of_trainer_broker_and_api_and_succeeds_once(stack: Stack):
    with stack.client() as client:
        arguments = TrainArguments(
            rerank_max_len=160, train_group_size=2, max_steps=300, save_steps=20, logging_steps=1
        )
        model = client.models()[0].name
        names = {entry.kind: entry.name for entry in client.datasets()}
        train = TrainJob(name="killed", model=model, dataset=names["training"], arguments=arguments)
        rerank = Rerank(checkpoint=From(source="train"), depth=3)
        reranked = EvalJob(name="after", dataset=names["beir"], rerank=rerank)
        jobs = client.submit(JobGroup(jobs={"train": train, "reranked": reranked}))
        first, last = (job.id for job in jobs)
        wait_until(
            "a training step",
            lambda: any(event.type is EventType.METRICS for event in client.events(first)),
            timeout_s=120,
        )
    stack.compose("kill", "trainer", "redis", "api")
    assert SERVICES - set(stack.containers()) == {"trainer", "redis", "api"}
    stack.up()
    with stack.client() as client:
        wait_until(
            "the end of the job", lambda: client.job(last).state in FINAL_STATES, timeout_s=300
        )
        ended = [client.job(job_id) for job_id in (first, last)]
        assert [job.state for job in ended] == [JobState.SUCCEEDED] * 2, ended
        assert ended[0].attempt == 2
        for job_id in (first, last):
            states = [
                event.data["state"]
                for event in client.events(job_id)
                if event.type is EventType.STATE
            ]
            assert states.count("succeeded") == 1
        assert [entry.name for entry in client.checkpoints()].count("killed") == 1
        assert len(client.evaluations(job_id=last)) == 1


@pytest.mark.usefixtures("demo_table")
def test_all_results_are_there_after_down_and_up(stack: Stack):
    with stack.client() as client:
        before = (client.jobs(), client.checkpoints(), client.evaluations(), client.datasets())
    stack.compose("down")
    assert stack.containers() == {}
    stack.up()
    with stack.client() as client:
        after = (client.jobs(), client.checkpoints(), client.evaluations(), client.datasets())
        assert after == before
        assert len(after[2]) >= 3
        path = f"/data/{after[1][0].path}/reranker.json"
    contract = json.loads(stack.compose("exec", "-T", "api", "cat", path))
    assert len(contract["probes"]) > 0
