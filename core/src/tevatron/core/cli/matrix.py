"""A matrix of variables, and what `${{ matrix.x }}` makes of a template in each of its cells.

The rules are those of `strategy.matrix` in GitHub Actions, but that nothing is passed over: an `exclude` that matches no
cell and a variable that a cell does not have are errors. Pure; knows nothing of jobs' fields.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from pydantic import JsonValue

from tevatron.core.errors import ConfigError, unknown_name

Cell = dict[str, JsonValue]
"""A value for each variable."""

_EXPRESSION = re.compile(r"\$\{\{\s*((?:(?!\}\}).)*?)\s*\}\}")
_VARIABLE = re.compile(r"matrix\.([A-Za-z_][A-Za-z0-9_-]*)")


@dataclass(frozen=True, slots=True)
class Matrix:
    """The variables and all cells."""

    axes: tuple[str, ...]
    """The variables that span it; those of `include` where there are no others."""
    cells: Sequence[Cell]


@dataclass(frozen=True, slots=True)
class Expanded:
    """What a template of named documents has become."""

    content: dict[str, JsonValue]
    """By name; documents of one name in several cells are one."""
    cells_of: dict[str, list[Cell]]
    """The cells that each of them belongs to."""


def read_matrix(content: JsonValue) -> Matrix:
    """Return the cells of `{variable: [values], ..., include?: [cells], exclude?: [cells]}`, in the file's order."""
    if not isinstance(content, dict):
        raise ConfigError(f"matrix: expected a mapping of variables to lists, got {content!r:.100}")
    axes = {
        name: _values(name, values)
        for name, values in content.items()
        if name not in ("include", "exclude")
    }
    spanned = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    cells = _without(spanned if axes else [], _entries(content, "exclude"), axes=axes)
    include = _entries(content, "include")
    cells = _with(cells, include, axes=axes)
    if not cells:
        raise ConfigError("matrix: there is no cell")
    return Matrix(tuple(axes or dict.fromkeys(name for entry in include for name in entry)), cells)


def _values(name: str, values: JsonValue) -> list[JsonValue]:
    if not _VARIABLE.fullmatch(f"matrix.{name}"):
        raise ConfigError(
            f"matrix: a variable's name has letters, digits, underscores and hyphens, got '{name}'"
        )
    if not isinstance(values, list) or not values:
        raise ConfigError(f"matrix.{name}: expected a list of values, got {values!r:.100}")
    for value, other in itertools.combinations(values, 2):
        if _is_same(value, other):
            raise ConfigError(f"matrix.{name}: {value!r} stands there twice")
    return values


def _entries(content: Mapping[str, JsonValue], key: str) -> list[Cell]:
    entries = content.get(key, [])
    if not _is_cells(entries):
        raise ConfigError(f"matrix.{key}: expected a list of mappings, got {entries!r:.100}")
    return entries


def _is_cells(entries: JsonValue) -> TypeGuard[list[Cell]]:
    return isinstance(entries, list) and all(isinstance(entry, dict) and entry for entry in entries)


def _is_same(one: JsonValue, other: JsonValue) -> bool:
    # In Python True is 1.
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _matches(cell: Cell, wanted: Mapping[str, JsonValue]) -> bool:
    return all(_is_same(cell[name], value) for name, value in wanted.items())


def _without(
    cells: Sequence[Cell], exclude: Sequence[Cell], *, axes: Mapping[str, object]
) -> list[Cell]:
    for entry in exclude:
        for name in entry:
            if name not in axes:
                raise ConfigError(f"matrix.exclude: {unknown_name('variable', name, axes)}")
        if not any(_matches(cell, entry) for cell in cells):
            raise ConfigError(f"matrix.exclude: no cell is {describe(entry)}")
    return [cell for cell in cells if not any(_matches(cell, entry) for entry in exclude)]


def _with(
    cells: Sequence[Cell], include: Sequence[Cell], *, axes: Mapping[str, object]
) -> list[Cell]:
    """Add each entry's variables to the cells that it contradicts nowhere, or the entry as a cell of its own."""
    spanned, added = [dict(cell) for cell in cells], []
    for entry in include:
        wanted = {name: value for name, value in entry.items() if name in axes}
        fitting = [cell for cell in spanned if _matches(cell, wanted)]
        for cell in fitting:
            cell.update(entry)
        if not fitting:
            added.append(dict(entry))
    return [*spanned, *added]


def expand(template: JsonValue, matrix: Matrix) -> Expanded:
    """Fill the template's names and documents in each cell; one name that gets two contents is an error."""
    if not isinstance(template, dict):
        raise ConfigError(f"jobs: expected a mapping of names, got {template!r:.100}")
    content: dict[str, JsonValue] = {}
    cells_of: dict[str, list[Cell]] = {}
    # All of one entry of the template together: the names are then in the file's order.
    for key, document in template.items():
        for cell in matrix.cells:
            name = _text(fill(key, cell), key)
            filled = fill(document, cell)
            if name in content and not _is_same(content[name], filled):
                raise ConfigError(
                    f"job '{name}' is not the same in the cells {describe(cells_of[name][0])} and "
                    f"{describe(cell)}: a variable that it uses is missing in its name, '{key}'"
                )
            content[name] = filled
            cells_of.setdefault(name, []).append(cell)
    return Expanded(content, cells_of)


def fill(template: JsonValue, cell: Cell) -> JsonValue:
    """Return the template with the cell's values; a value that stands alone keeps its type."""
    if isinstance(template, list):
        return [fill(item, cell) for item in template]
    if isinstance(template, dict):
        return {_text(fill(key, cell), key): fill(item, cell) for key, item in template.items()}
    if not isinstance(template, str):
        return template
    if alone := _EXPRESSION.fullmatch(template):
        return _value(alone[1], cell, template)
    filled = _EXPRESSION.sub(
        lambda found: _text(_value(found[1], cell, template), template), template
    )
    if "${{" in filled:
        raise ConfigError(f"'{template}': '${{{{' is not closed by '}}}}'")
    return filled


def _value(expression: str, cell: Cell, template: str) -> JsonValue:
    variable = _VARIABLE.fullmatch(expression)
    if variable is None:
        raise ConfigError(f"'{template}': expected ${{{{ matrix.NAME }}}}, got '{expression}'")
    if variable[1] not in cell:
        problem = unknown_name("variable", variable[1], cell)
        raise ConfigError(f"'{template}', in the cell {describe(cell)}: {problem}")
    return cell[variable[1]]


def _text(value: JsonValue, template: str) -> str:
    """Return a value as a part of a text, as YAML writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise ConfigError(
        f"'{template}': only a text, number or boolean can be part of a text, got {value!r:.100}"
    )


def describe(cell: Cell) -> str:
    """Return a cell as it would stand in the file."""
    return f"{{{', '.join(f'{name}: {show(value)}' for name, value in cell.items())}}}"


def show(value: JsonValue) -> str:
    """Return a value for people."""
    return value if isinstance(value, str) else json.dumps(value)
