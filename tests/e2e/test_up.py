"""`tevatron up`: comes up, restarts what dies, leaves nothing behind, goes on where it was."""

import os
import signal
import socket
import stat

import httpx
import psutil
import pytest
from tests.e2e.conftest import left_over
from tests.support.processes import wait_for

from tevatron.core.contracts.jobs import FINAL_STATES, EvalJob, JobState, TrainJob
from tevatron.core.contracts.resources import DatasetRequest, ModelRequest
from tevatron.core.contracts.train import TrainArguments

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SERVICES = {"postgres", "valkey", "api", "dispatcher", "trainer", "evaluator", "scorer"}


def submit_eval(client, sample, *, name="sample"):
    if name not in {entry.name for entry in client.datasets()}:
        client.register_dataset(DatasetRequest(name=name, kind="beir", path=str(sample)))
    return client.submit(EvalJob(dataset=name))[0]


def ended(client, job, *, timeout_s=150):
    wait_for(lambda: client.job(job.id).state in FINAL_STATES, timeout_s=timeout_s, what=job.id)
    return client.job(job.id)


def test_ctrl_c_stops_everything_in_order(stack):
    with stack.up():
        assert httpx.get(f"{stack.file['url']}/readyz").status_code == 200
    assert set(stack.file["pids"]) == SERVICES
    assert stat.S_IMODE((stack.home / "run" / "stack.json").stat().st_mode) == 0o600
    processes = stack.processes()
    assert len(processes) > len(SERVICES)
    assert stack.stop() == 0
    assert left_over(processes, timeout_s=2) == []
    assert not (stack.home / "run" / "stack.json").exists()
    assert not (stack.home / "postgres" / "data" / "postmaster.pid").exists()
    assert (stack.home / "logs" / "api.log").stat().st_size > 0


def test_kill_9_leaves_no_process_and_the_next_up_finishes_the_job(stack, sample, tiny_model):
    with stack.up() as client:
        client.register_model(ModelRequest(name="tiny", path=str(tiny_model)))
        training = sample.parent / "train.jsonl"
        client.register_dataset(DatasetRequest(name="rows", kind="training", path=str(training)))
        arguments = TrainArguments(
            rerank_max_len=128, train_group_size=2, max_steps=150, save_steps=20, logging_steps=1
        )
        job = client.submit(TrainJob(model="tiny", dataset="rows", arguments=arguments))[0]
        wait_for(
            lambda: any(event.type == "metrics" for event in client.events(job.id)),
            timeout_s=150,
            what="the first step",
        )
        processes = stack.kill()
    assert left_over(processes) == []
    with stack.up() as client:
        found = ended(client, job, timeout_s=300)
        assert (found.state, found.message) == (JobState.SUCCEEDED, None)
        assert len(client.checkpoints()) == 1
    assert stack.stop() == 0


def test_a_home_is_for_one_up_and_a_closed_terminal_stops_it(stack):
    stack.home.parent.chmod(0o700)
    with stack.up():
        second = stack.run("up")
        assert second.returncode == 1
        assert f"another `tevatron up` (process {stack.process.pid}) runs on" in second.stderr
        assert stack.process.poll() is None
        # It may be the folder of a clone, whose mode is the user's.
        assert stat.S_IMODE(stack.home.parent.stat().st_mode) == 0o700
        processes = stack.processes()
        stack.process.send_signal(signal.SIGHUP)
        assert stack.process.wait(timeout=60) == 0
    assert left_over(processes, timeout_s=2) == []


def test_port_that_is_taken_is_an_error(stack):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = stack.run("up", "--port", str(port))
    assert done.returncode == 1
    assert f"port {port} of 127.0.0.1 is taken" in done.stderr


def test_each_killed_service_comes_back_and_jobs_run(stack, sample):
    with stack.up() as client:
        for count, service in enumerate(
            ["api", "dispatcher", "evaluator", "valkey", "postgres"], start=1
        ):
            old = stack.file["pids"][service]
            os.kill(old, signal.SIGKILL)
            new = wait_for(
                lambda: (pid := stack.file["pids"][service]) != old and pid,  # noqa: B023
                what=f"a new {service}",
            )
            assert psutil.pid_exists(new)
            wait_for(lambda: _is_ready(stack), timeout_s=60, what=f"readiness after {service}")
            assert ended(client, submit_eval(client, sample)).state is JobState.SUCCEEDED, service
            assert [entry.metrics["ndcg@10"] for entry in client.evaluations()] == [1.0] * count


def _is_ready(stack):
    try:
        return httpx.get(f"{stack.file['url']}/readyz", verify=False).status_code == 200
    except httpx.TransportError:
        return False
