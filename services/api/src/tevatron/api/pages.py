"""A repository's page of rows as the API's page of resources."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tevatron.core.contracts.resources import Page, Resource
from tevatron.core.store.paging import Page as RowPage

Row = TypeVar("Row")
Item = TypeVar("Item", bound=Resource)


def page_resource(page: RowPage[Row], convert: Callable[[Row], Item]) -> Page[Item]:
    """Convert each row; the cursor stays what the repository made it."""
    return Page[Item](
        data=[convert(row) for row in page.items],
        has_more=page.next_cursor is not None,
        next=page.next_cursor,
    )
