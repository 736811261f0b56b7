"""Models and datasets: registered once under a name, then referred to by name or id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from pydantic import JsonValue
from sqlalchemy import or_, select
from sqlalchemy.exc import IntegrityError

from tevatron.core.errors import ConfigError, ConflictError, NotFoundError
from tevatron.core.ids import new_id
from tevatron.core.store.models import Dataset, DatasetKind, DatasetState, Model
from tevatron.core.store.repository import KeyScope, Repository, owned_by

Registered = TypeVar("Registered", Model, Dataset)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """Where a dataset was fetched from."""

    hub_id: str
    revision: str
    file: str | None


class _RegisteredRepository(Repository[Registered]):
    """A table whose names are unique within a key."""

    def check_free(self, name: str, *, key_id: str | None) -> None:
        """Raise `ConflictError` where the key has a row of this name."""
        if self.find(name, key_id=key_id) is not None:
            raise ConflictError(f"a {self.noun} named '{name}' exists already")

    def _add(self, row: Registered) -> Registered:
        try:
            # A savepoint, so that the caller's transaction survives a name that is taken.
            with self._session.begin_nested():
                self._session.add(row)
        except IntegrityError:
            self.check_free(row.name, key_id=row.key_id)
            raise
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
        path: str | None = None,
        sha256: str | None = None,
        stats: dict[str, JsonValue] | None = None,
        hub: HubSource | None = None,
        url: str | None = None,
    ) -> Dataset:
        """Register a dataset.

        Args:
            path: Where it lies; None for a place of its own below TEVATRON_DATA, which the row then names.
            sha256: Of the content; without it a dataset at its own place awaits it.
            stats: What was counted when it was read.
            hub: Where it was fetched from.
            url: Where else it was fetched from.
        """
        dataset_id = new_id("ds")
        is_awaiting = path is None and sha256 is None
        return self._add(
            Dataset(
                id=dataset_id,
                name=name,
                key_id=key_id,
                kind=kind,
                stats=stats or {},
                path=path or f"datasets/{dataset_id}/content",
                sha256=sha256,
                state=DatasetState.AWAITING_CONTENT if is_awaiting else DatasetState.READY,
                hub_id=None if hub is None else hub.hub_id,
                hub_revision=None if hub is None else hub.revision,
                hub_file=None if hub is None else hub.file,
                url=url,
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

    def get_of_kind(self, ref: str, kind: DatasetKind, *, key_id: KeyScope) -> Dataset:
        """Return the dataset, which must be of this kind."""
        dataset = self.get(ref, key_id=key_id)
        if dataset.kind is not kind:
            raise ConfigError(
                f"dataset '{ref}' is of kind {dataset.kind}; one of kind {kind} is needed here"
            )
        if dataset.state is not DatasetState.READY:
            raise ConflictError(f"dataset '{ref}' is {dataset.state}; upload its content first")
        return dataset
