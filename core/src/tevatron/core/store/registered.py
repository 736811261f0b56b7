"""Models and datasets: registered once under a name, then referred to by name or id."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from pydantic import JsonValue
from sqlalchemy import or_, select
from sqlalchemy.exc import IntegrityError

from tevatron.core.errors import ConfigError, ConflictError, NotFoundError
from tevatron.core.ids import new_id
from tevatron.core.store.models import Dataset, DatasetKind, DatasetState, Model
from tevatron.core.store.repository import Repository, owned_by

Registered = TypeVar("Registered", Model, Dataset)


class _RegisteredRepository(Repository[Registered]):
    """A table whose names are unique within a key."""

    def _add(self, row: Registered) -> Registered:
        try:
            # A savepoint, so that the caller's transaction survives a name that is taken.
            with self._session.begin_nested():
                self._session.add(row)
        except IntegrityError as error:
            if self.find(row.name, key_id=row.key_id) is None:
                raise
            raise ConflictError(f"a {self.noun} named '{row.name}' exists already") from error
        return row

    def find(self, name: str, *, key_id: str | None) -> Registered | None:
        """Return the key's row of this very name, if there is one."""
        table = self.table
        return self._session.scalars(
            select(table).where(owned_by(table.key_id, key_id), table.name == name)
        ).first()


class ModelRepository(_RegisteredRepository[Model]):
    """Base models."""

    table = Model
    noun: ClassVar[str] = "model"

    def create(
        self,
        name: str,
        *,
        key_id: str | None,
        path: str | None = None,
        hub_id: str | None = None,
        hub_revision: str | None = None,
        sha256: str | None = None,
    ) -> Model:
        """Register a folder by `path`, or a hub id with its revision."""
        return self._add(
            Model(
                id=new_id("model"),
                name=name,
                key_id=key_id,
                path=path,
                hub_id=hub_id,
                hub_revision=hub_revision,
                sha256=sha256,
            )
        )

    def find_base(self, base_model: str, *, key_id: str | None) -> Model | None:
        """Return the key's model that a contract names as its base: by hub id, or by name."""
        is_meant = or_(Model.hub_id == base_model, Model.name == base_model)
        return self._session.scalars(
            select(Model).where(owned_by(Model.key_id, key_id), is_meant).order_by(Model.id)
        ).first()


class DatasetRepository(_RegisteredRepository[Dataset]):
    """Datasets."""

    table = Dataset
    noun: ClassVar[str] = "dataset"

    def create(
        self,
        name: str,
        *,
        key_id: str | None,
        kind: DatasetKind,
        stats: dict[str, JsonValue],
        path: str | None = None,
        hub_id: str | None = None,
        hub_revision: str | None = None,
        sha256: str | None = None,
    ) -> Dataset:
        """Register a file or folder by `path`, or a hub id with its revision."""
        return self._add(
            Dataset(
                id=new_id("ds"),
                name=name,
                key_id=key_id,
                kind=kind,
                stats=stats,
                path=path,
                hub_id=hub_id,
                hub_revision=hub_revision,
                sha256=sha256,
            )
        )

    def create_awaiting(self, name: str, *, key_id: str | None, kind: DatasetKind) -> Dataset:
        """Register a dataset whose content is uploaded next, to the path that it has already."""
        dataset_id = new_id("ds")
        return self._add(
            Dataset(
                id=dataset_id,
                name=name,
                key_id=key_id,
                kind=kind,
                stats={},
                path=f"datasets/{dataset_id}/content",
                state=DatasetState.AWAITING_CONTENT,
            )
        )

    def lock_awaiting(self, dataset_id: str) -> Dataset:
        """Lock and return a dataset whose content is still to come."""
        dataset = self._session.get(
            Dataset, dataset_id, with_for_update=True, populate_existing=True
        )
        if dataset is None:
            raise NotFoundError(f"dataset '{dataset_id}' is gone")
        if dataset.state is not DatasetState.AWAITING_CONTENT:
            raise ConflictError(f"dataset '{dataset_id}' has its content already; register another")
        return dataset

    def get_of_kind(self, ref: str, kind: DatasetKind, *, key_id: str | None) -> Dataset:
        """Return the dataset, which must be of this kind."""
        dataset = self.get(ref, key_id=key_id)
        if dataset.kind is not kind:
            raise ConfigError(
                f"dataset '{ref}' is of kind {dataset.kind}; one of kind {kind} is needed here"
            )
        if dataset.state is not DatasetState.READY:
            raise ConflictError(f"dataset '{ref}' is {dataset.state}; upload its content first")
        return dataset
