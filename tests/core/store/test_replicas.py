"""A scorer with replicas: hosts serve them one by one, people and jobs have one scorer."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select, text
from tests.core.store.test_claims import do
from tests.core.store.test_scorers import (
    checkpoint,  # noqa: F401  a fixture
    end_leases,
    ready,
    reap_now,
    row,
    take,
    target,  # noqa: F401  a fixture
)
from tests.support.store import eval_job, submit

from tevatron.core.errors import ConflictError, NotFoundError
from tevatron.core.store.models import Scorer
from tevatron.core.store.scorers import (
    ScorerRepository,
    release_scorer,
    request_scorer,
    scorer_failed,
    scorer_stopped,
)


def look(sessions, scorer_id):
    [found] = do(sessions, lambda session: ScorerRepository(session).replicas([scorer_id]))
    return found


def states(sessions, scorer_id):
    return [row.state.value for row in look(sessions, scorer_id).rows]


def test_each_replica_is_claimed_by_itself_and_all_say_the_same(sessions, target):  # noqa: F811
    scorer_id = do(sessions, request_scorer, target, key_id=None, replicas=3, ttl_s=9.0, name="s")
    claims = [take(sessions, host=f"h{place}") for place in range(3)]
    assert take(sessions) is None
    assert [claim.scorer_id for claim in claims] == [
        scorer_id,
        f"{scorer_id}-2",
        f"{scorer_id}-3",
    ]
    assert {claim.target for claim in claims} == {target}
    rows = look(sessions, scorer_id).rows
    assert [(row.replica, row.holder, row.ttl_s, row.name) for row in rows] == [
        (1, "h0", 9.0, "s"),
        (2, "h1", 9.0, "s"),
        (3, "h2", 9.0, "s"),
    ]


def test_it_is_known_by_the_replica_that_is_furthest(sessions, target):  # noqa: F811
    scorer_id = do(sessions, request_scorer, target, key_id=None, replicas=3)
    first, second, third = (take(sessions) for _ in range(3))
    assert look(sessions, scorer_id).best.state == "starting"
    ready(sessions, second, port=2)
    found = look(sessions, scorer_id)
    assert (found.best.state, found.best.url, found.num_ready) == ("ready", "http://host:2", 1)
    do(sessions, scorer_failed, first, "out of memory")
    assert look(sessions, scorer_id).best.state == "ready"
    assert (
        do(sessions, lambda session: ScorerRepository(session).get_live(scorer_id, key_id=None)).id
        == scorer_id
    )
    for claim in (second, third):
        do(sessions, scorer_failed, claim, "out of memory")
    assert look(sessions, scorer_id).best.state == "failed"
    with pytest.raises(ConflictError, match=f"scorer '{scorer_id}' is failed; start another"):
        do(sessions, lambda session: ScorerRepository(session).get_live(scorer_id, key_id=None))


def test_users_see_one_scorer_and_metrics_every_replica(sessions, target):  # noqa: F811
    scorer_id = do(sessions, request_scorer, target, key_id=None, replicas=3, name="three")
    take(sessions)
    with sessions() as session:
        repository = ScorerRepository(session)
        assert [row.id for row in repository.list_page(key_id=None).items] == [scorer_id]
        assert repository.get("three", key_id=None).id == scorer_id
        [found] = repository.of_checkpoint(target.checkpoint_id, key_id=None)
        assert len(found.rows) == 3
        assert repository.count_by_state() == {"starting": 1, "wanted": 2}
        with pytest.raises(NotFoundError, match=r"unknown scorer .*-2'; there are: three"):
            repository.get(f"{scorer_id}-2", key_id=None)


def test_a_dead_host_loses_its_replica_alone_and_another_takes_it(sessions, target):  # noqa: F811
    scorer_id = do(sessions, request_scorer, target, key_id=None, replicas=2)
    dead, alive = take(sessions, host="dead"), take(sessions, host="alive")
    for port, claim in enumerate((dead, alive), start=1):
        ready(sessions, claim, port=port)
    with sessions.begin() as session:
        session.execute(
            text("UPDATE scorers SET lease_until = now() - interval '1 hour' WHERE holder = 'dead'")
        )
    assert reap_now(sessions) == [dead.scorer_id]
    found = look(sessions, scorer_id)
    assert (found.best.state, found.best.url) == ("ready", "http://host:2")
    again = take(sessions, host="third")
    assert (again.scorer_id, again.fence) == (dead.scorer_id, 2)
    ready(sessions, again, port=3)
    assert look(sessions, scorer_id).num_ready == 2


def test_who_has_no_server_comes_before_second_replicas(sessions, target):  # noqa: F811
    wide = do(sessions, request_scorer, target, key_id=None, replicas=3)
    narrow = do(sessions, request_scorer, target, key_id=None)
    order = [take(sessions).scorer_id for _ in range(4)]
    assert order == [wide, narrow, f"{wide}-2", f"{wide}-3"]


def test_letting_it_go_ends_every_replica(sessions, target):  # noqa: F811
    scorer_id = do(sessions, request_scorer, target, key_id=None, replicas=3)
    claims = [take(sessions) for _ in range(2)]
    ready(sessions, claims[0])
    do(sessions, release_scorer, scorer_id)
    assert states(sessions, scorer_id) == ["stopping", "stopping", "stopped"]
    for claim in claims:
        do(sessions, scorer_stopped, claim)
    assert states(sessions, scorer_id) == ["stopped"] * 3
    assert take(sessions) is None


def test_its_time_to_live_is_that_of_all_its_replicas(sessions, target):  # noqa: F811
    scorer_id = do(sessions, request_scorer, target, key_id=None, replicas=3, ttl_s=60.0)
    ready(sessions, take(sessions))
    take(sessions)
    age = "UPDATE scorers SET last_used_at = now() - interval '61 s'"
    with sessions.begin() as session:
        session.execute(text(f"{age} WHERE replica < 3"))
    # One was used a moment ago.
    assert reap_now(sessions) == []
    with sessions.begin() as session:
        session.execute(text(age))
        ScorerRepository(session).touch([scorer_id])
    assert reap_now(sessions) == []
    with sessions.begin() as session:
        session.execute(text(age))
    assert sorted(reap_now(sessions)) == [scorer_id, f"{scorer_id}-2", f"{scorer_id}-3"]
    assert states(sessions, scorer_id) == ["stopping", "stopping", "stopped"]


def test_a_job_has_one_scorer_with_replicas_also_where_its_first_has_failed(sessions, target):  # noqa: F811
    [job_id] = submit(sessions, check=eval_job())
    ask = {"key_id": None, "job_id": job_id, "replicas": 2}
    scorer_id = do(sessions, request_scorer, target, **ask)
    do(sessions, scorer_failed, take(sessions), "x")
    assert do(sessions, request_scorer, target, **ask) == scorer_id
    with sessions() as session:
        assert session.scalar(select(func.count()).select_from(Scorer)) == 2


def test_replicas_that_wait_do_not_drive_out_their_own_scorer(sessions, target):  # noqa: F811
    first, second = submit(sessions, a=eval_job(), b=eval_job())
    held = do(sessions, request_scorer, target, key_id=None, job_id=first, replicas=2)
    ready(sessions, take(sessions))
    assert reap_now(sessions) == []
    # Another job has a server, and waits for its second: that is no reason either.
    other = do(sessions, request_scorer, target, key_id=None, job_id=second, replicas=2)
    assert take(sessions).scorer_id == other
    assert reap_now(sessions) == []
    third = do(sessions, request_scorer, target, key_id=None)
    assert set(reap_now(sessions)) == {held, f"{held}-2", other, f"{other}-2"}
    assert row(sessions, third).state == "wanted"


def test_a_replica_that_kills_every_host_fails_alone(sessions, target):  # noqa: F811
    scorer_id = do(sessions, request_scorer, target, key_id=None, replicas=2)
    for _ in range(2):
        take(sessions)
        end_leases(sessions)
        reap_now(sessions, max_attempts=2)
    assert states(sessions, scorer_id) == ["failed", "wanted"]
