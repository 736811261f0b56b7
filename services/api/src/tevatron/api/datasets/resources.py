"""A dataset's row as the API's resource."""

from __future__ import annotations

from tevatron.core.contracts.resources import DatasetResource
from tevatron.core.store.models import Dataset


def dataset_resource(row: Dataset) -> DatasetResource:
    """Convert one row."""
    return DatasetResource(
        id=row.id,
        name=row.name,
        kind=row.kind,
        state=row.state,
        path=row.path,
        hub_id=row.hub_id,
        revision=row.hub_revision,
        file=row.hub_file,
        url=row.url,
        sha256=row.sha256,
        stats=row.stats,
        created_at=row.created_at,
    )
