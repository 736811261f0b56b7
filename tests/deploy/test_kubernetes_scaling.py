"""What KEDA asks of Postgres and what it scales, and the optional components."""

import re

import psycopg
import pytest
from sqlalchemy import make_url, update
from tests.support.manifests import (
    ROOT,
    container_of,
    environment_of,
    of_kind,
    pod_templates,
    settings_of,
)
from tests.support.store import eval_job, register, submit, train_job

from tevatron.core.contracts.jobs import JobState
from tevatron.core.store.models import Job, Scorer, ScorerState
from tevatron.core.store.registered import ModelRepository
from tevatron.core.store.scorers import ScorerTarget, request_scorer
from tevatron.scorer.host.main import places

# Scaling


@pytest.fixture
def scaled(gpu):
    """What KEDA scales, by component: the spec and its one trigger's metadata."""
    found = {}
    for name, manifest in of_kind(gpu, "ScaledObject").items():
        (trigger,) = manifest["spec"]["triggers"]
        assert trigger["type"] == "postgresql"
        found[name.removeprefix("tevatron-")] = (manifest["spec"], trigger["metadata"])
    return found


@pytest.fixture
def count(database_url, scaled):
    """Asks a trigger's query as KEDA does: over libpq, as the role that the docs make."""
    page = (ROOT / "docs/deploy-kubernetes.md").read_text()
    (script,) = re.findall(r"```sql\n(.*?)```", page, flags=re.DOTALL)
    owner = make_url(database_url).set(drivername="postgresql")
    role = f"counter_{owner.database}"
    script = script.replace("tevatron_counter", role)
    script = script.replace("DATABASE tevatron", f"DATABASE {owner.database}")
    counter = owner.set(username=role, password="CHANGE-ME")
    with psycopg.connect(owner.render_as_string(hide_password=False), autocommit=True) as admin:
        admin.execute(script)
        with psycopg.connect(
            counter.render_as_string(hide_password=False), autocommit=True
        ) as connection:

            def ask(component):
                (row,) = connection.execute(scaled[component][1]["query"]).fetchall()
                (value,) = row
                return value

            ask.connection = connection
            yield ask
        admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_workers_are_counted_by_their_own_jobs_that_wait_or_run(sessions, count):
    jobs = submit(
        sessions, **{f"train-{n}": train_job() for n in range(8)}, a=eval_job(), b=eval_job()
    )
    assert (count("trainer"), count("evaluator"), count("scorer")) == (8, 2, 0)
    with sessions.begin() as session:
        for job_id, state in zip(jobs, JobState, strict=False):
            session.execute(update(Job).where(Job.id == job_id).values(state=state))
    # queued, starting, running, cancelling; not waiting, and none of the three ends.
    assert (count("trainer"), count("evaluator")) == (4, 2)


def test_hosts_are_counted_by_scorers_that_are_wanted_or_served(sessions, count):
    with sessions.begin() as session:
        register(session)
        model_id = ModelRepository(session).get("base", key_id=None).id
        wanted = [
            request_scorer(session, ScorerTarget(model_id=model_id), key_id=None)
            for _ in ScorerState
        ]
        for scorer_id, state in zip(wanted, ScorerState, strict=True):
            url = "http://scorer" if state is ScorerState.READY else None
            session.execute(
                update(Scorer).where(Scorer.id == scorer_id).values(state=state, url=url)
            )
        session.add(
            Scorer(
                id="outside",
                scorer_id="outside",
                state=ScorerState.READY,
                external=True,
                engine="hf",
                url="http://outside",
            )
        )
    # wanted, starting, ready, stopping; not stopped, failed, nor the outside one.
    assert count("scorer") == 4


def test_who_counts_may_do_nothing_else(count):
    for statement in (
        "SELECT secret_sha256 FROM api_keys",
        "SELECT spec FROM jobs",
        "SELECT token FROM scorers",
        "UPDATE jobs SET state = 'queued'",
        "CREATE TABLE mine (id int)",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            count.connection.execute(statement)


def test_keda_and_the_hpa_own_the_number_of_pods(gpu, scaled):
    assert set(scaled) == {"trainer", "evaluator", "scorer"}
    deployments = of_kind(gpu, "Deployment")
    for spec, trigger in scaled.values():
        deployment = deployments[spec["scaleTargetRef"]["name"]]
        assert "replicas" not in deployment["spec"]
        assert spec["minReplicaCount"] < spec["maxReplicaCount"]
        assert trigger["targetQueryValue"]
    assert "replicas" not in deployments["tevatron-api"]["spec"]
    hpa = of_kind(gpu, "HorizontalPodAutoscaler")["tevatron-api"]["spec"]
    assert hpa["scaleTargetRef"]["name"] == "tevatron-api"


def test_a_pod_is_wanted_for_each_job_and_for_each_slot(gpu, scaled):
    # Celery's pool is `solo`: a worker has one job at a time.
    for component in ("trainer", "evaluator"):
        assert scaled[component][1]["targetQueryValue"] == "1"
    slots = len(places(settings_of("tevatron-scorer", gpu)))
    assert scaled["scorer"][1]["targetQueryValue"] == str(slots)


def test_scorers_run_where_the_gpus_are(gpu):
    template = pod_templates(gpu)["tevatron-scorer"]
    devices = settings_of("tevatron-scorer", gpu).devices
    assert devices is not None
    gpus = container_of(template)["resources"]["limits"]["nvidia.com/gpu"]
    assert len(devices.split(",")) == gpus
    assert template["spec"]["nodeSelector"] == {"nvidia.com/gpu.present": "true"}


# Options


def test_kueue_gets_jobsets_and_scorer_hosts(rendered):
    manifests = rendered["options"]
    (queue,) = of_kind(manifests, "LocalQueue")
    scorer = of_kind(manifests, "Deployment")["tevatron-scorer"]
    assert scorer["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue
    trainer = environment_of(pod_templates(manifests)["tevatron-trainer"], manifests)
    assert trainer["TEVATRON_JOBSET_QUEUE"] == queue


def test_the_hub_is_allowed_by_choice_alone(rendered, gpu):
    assert settings_of("tevatron-api", gpu).allow_hub is False
    assert settings_of("tevatron-api", rendered["options"]).allow_hub is True
    assert "to-hub" in of_kind(rendered["options"], "NetworkPolicy")


def test_the_dispatcher_reaches_receivers_of_webhooks_by_choice_alone(rendered, gpu):
    assert "to-webhooks" not in of_kind(gpu, "NetworkPolicy")
    policy = of_kind(rendered["options"], "NetworkPolicy")["to-webhooks"]["spec"]
    assert policy["podSelector"]["matchLabels"] == {"app.kubernetes.io/component": "dispatcher"}
    [rule] = policy["egress"]
    assert rule["ports"] == [{"port": 443, "protocol": "TCP"}]
    assert "10.0.0.0/8" in rule["to"][0]["ipBlock"]["except"]


def test_trainings_reach_trackers_by_choice_alone(rendered, gpu):
    names = {"trainer-to-trackers", "ranks-to-trackers"}
    assert names & set(of_kind(gpu, "NetworkPolicy")) == set()
    policies = of_kind(rendered["options"], "NetworkPolicy")
    first, second = (policies[name]["spec"]["egress"] for name in sorted(names))
    assert first == second
    [rule] = first
    assert rule["ports"] == [{"port": 443, "protocol": "TCP"}]
    assert "10.0.0.0/8" in rule["to"][0]["ipBlock"]["except"]
    assert (
        policies["ranks-to-trackers"]["spec"]["podSelector"]
        == (of_kind(gpu, "NetworkPolicy")["ranks"]["spec"]["podSelector"])
    )
