"""Rows of scorers as the API's resources."""

from __future__ import annotations

from tevatron.core.contracts.resources import ScorerReplica, ScorerResource
from tevatron.core.store.replicas import Replicas


def scorer_resource(scorer: Replicas) -> ScorerResource:
    """Convert a scorer with its replicas."""
    first, best = scorer.first, scorer.best
    return ScorerResource(
        id=first.id,
        name=first.name,
        state=best.state,
        replicas=len(scorer.rows),
        ready_replicas=scorer.num_ready,
        servers=[ScorerReplica.model_validate(row) for row in scorer.rows],
        checkpoint_id=first.checkpoint_id,
        model_id=first.model_id,
        engine=first.engine,
        dtype=first.dtype,
        url=best.url,
        holder=best.holder,
        external=first.external,
        job_id=first.job_id,
        ttl_s=first.ttl_s,
        error=best.error,
        created_at=first.created_at,
    )
