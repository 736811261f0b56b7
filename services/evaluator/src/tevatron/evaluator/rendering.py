"""Writes a table as markdown, LaTeX (booktabs), CSV, HTML or JSON. Rounds for people; CSV and JSON keep every digit."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

from tevatron.core.errors import ConfigError
from tevatron.evaluator.table import RANDOMISATION_MARK, T_MARK, Cell, Table

DIGITS = 4


class Format(StrEnum):
    """Forms of a table."""

    MARKDOWN = "markdown"
    LATEX = "latex"
    CSV = "csv"
    HTML = "html"
    JSON = "json"


FORMATS = {
    ".md": Format.MARKDOWN,
    ".tex": Format.LATEX,
    ".csv": Format.CSV,
    ".html": Format.HTML,
    ".json": Format.JSON,
}
"""Form of a table by the ending of its file."""


def format_of(path: Path) -> Format:
    """Return the form that a table takes in this file."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--output {path}: expected a name that ends with {', '.join(FORMATS)}")
    return FORMATS[path.suffix.lower()]


def render(table: Table, form: Format) -> str:
    """Write a table; the text ends with a newline."""
    return _RENDERERS[form](table)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align a table of texts; every column but the first is aligned right."""
    cells = [[_one_line(cell).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        for row in (cells[0], rule, *cells[1:])
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _markdown(table: Table) -> str:
    def shown(cell: Cell) -> str:
        text = _number(cell) + cell.marks.replace("*", "\\*")
        return f"**{text}**{_delta(cell)}" if cell.is_best else f"{text}{_delta(cell)}"

    rows = [[row.label, *map(shown, row.cells)] for row in table.rows]
    text = markdown([table.corner, *table.columns], rows)
    title = f"**{_one_line(table.title)}**\n\n" if table.title else ""
    notes = "".join(f"\n{_one_line(note)}\n" for note in table.notes)
    return title + text + notes.replace("\n* ", "\n\\* ")


def _latex(table: Table) -> str:
    def shown(cell: Cell) -> str:
        number = _number(cell)
        text = f"\\textbf{{{number}}}" if cell.is_best else number
        marks = f"$^{{{''.join(_TEX_MARKS[mark] for mark in cell.marks)}}}$" if cell.marks else ""
        delta = f" {{\\scriptsize ({_signed(cell.delta)})}}" if cell.delta is not None else ""
        return text + marks + delta

    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{_tex('. '.join(filter(None, [table.title, *table.notes])))}}}",
        f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        "\\toprule",
        _tex_line([table.corner, *table.columns]),
        "\\midrule",
    ]
    for row in table.rows:
        if row.is_total:
            lines.append("\\midrule")
        lines.append(f"{_tex(row.label)} & {' & '.join(map(shown, row.cells))} \\\\")
    lines += ["\\bottomrule", "\\end{tabular}", "\\end{table}"]
    return "\n".join(lines) + "\n"


def _csv(table: Table) -> str:
    has_deltas = any(cell.delta is not None for row in table.rows for cell in row.cells)
    has_tests = any(cell.tests is not None for row in table.rows for cell in row.cells)
    suffixes = [
        "",
        *([" delta"] if has_deltas else []),
        *([" p t-test", " p randomisation"] if has_tests else []),
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [table.corner, *(column + suffix for column in table.columns for suffix in suffixes)]
    )
    for row in table.rows:
        fields: list[float | None] = []
        for cell in row.cells:
            fields.append(cell.value)
            fields += [cell.delta] if has_deltas else []
            fields += list(cell.tests or (None, None)) if has_tests else []
        writer.writerow([row.label, *("" if value is None else repr(value) for value in fields)])
    return out.getvalue()


def _json(table: Table) -> str:
    document = {
        "title": table.title,
        "columns": table.columns,
        "rows": [
            {
                "label": row.label,
                "is_total": row.is_total,
                "cells": {
                    column: {
                        "value": cell.value,
                        "delta": cell.delta,
                        "is_best": cell.is_best,
                        "is_partial": cell.is_partial,
                        "p": None if cell.tests is None else cell.tests._asdict(),
                    }
                    for column, cell in zip(table.columns, row.cells, strict=True)
                },
            }
            for row in table.rows
        ],
        "notes": table.notes,
    }
    return json.dumps(document, indent=2) + "\n"


_STYLE = """\
:root { color-scheme: light dark; --line: #d0d7de; --soft: #59636e; --up: #1a7f37; --down: #b42318; --back: #fff; --alt: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --line: #3d444d; --soft: #9198a1; --up: #3fb950; --down: #f97066; --back: #0d1117; --alt: #151b23; } }
body { margin: 1.5rem auto; padding: 0 1rem; max-width: 96rem; font: 15px/1.5 system-ui, sans-serif; background: var(--back); }
h1 { font-size: 1.25rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); background: var(--back); }
thead th { background: var(--alt); }
th:first-child { position: sticky; left: 0; text-align: left; font-weight: 500; border-right: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
tr.total > * { border-top: 2px solid var(--line); }
tr.total th { font-weight: 700; }
td small { display: inline-block; min-width: 4.2em; color: var(--soft); }
td small.up { color: var(--up); }
td small.down { color: var(--down); }
sup { line-height: 0; }
.notes { padding-left: 1.2rem; color: var(--soft); font-size: .87rem; }
@media (max-width: 40rem) {
  th, td { padding: .35rem .4rem; font-size: .93rem; vertical-align: top; }
  th:first-child { min-width: 6.5rem; max-width: 8rem; white-space: normal; overflow-wrap: break-word; }
  td small { display: block; min-width: 0; }
}"""


def _html(table: Table) -> str:
    title = html.escape(table.title or "Results")
    head = "".join(
        f'<th scope="col">{html.escape(text)}</th>' for text in (table.corner, *table.columns)
    )
    body = "\n".join(
        f'<tr{" class=" + chr(34) + "total" + chr(34) if row.is_total else ""}><th scope="row">{html.escape(row.label)}</th>'
        f"{''.join(map(_html_cell, row.cells))}</tr>"
        for row in table.rows
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    return f"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{_STYLE}
</style>
</head>
<body>
<h1>{title}</h1>
<div class="scroll" tabindex="0">
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>
{f'<ul class="notes">{notes}</ul>' if notes else ""}
</body>
</html>
"""


def _html_cell(cell: Cell) -> str:
    number = html.escape(_number(cell))
    text = f"<b>{number}</b>" if cell.is_best else number
    marks = f"<sup>{html.escape(cell.marks)}</sup>" if cell.marks else ""
    delta = ""
    if cell.delta is not None:
        way = "up" if cell.delta > 0 else "down" if cell.delta < 0 else ""
        delta = f' <small class="{way}">{_signed(cell.delta)}</small>'
    return f"<td>{text}{marks}{delta}</td>"


_RENDERERS: dict[Format, Callable[[Table], str]] = {
    Format.MARKDOWN: _markdown,
    Format.LATEX: _latex,
    Format.CSV: _csv,
    Format.HTML: _html,
    Format.JSON: _json,
}


def _number(cell: Cell) -> str:
    if cell.value is None:
        return "-"
    return f"{cell.value:.{DIGITS}f}{' (partial)' if cell.is_partial else ''}"


def _delta(cell: Cell) -> str:
    return "" if cell.delta is None else f" ({_signed(cell.delta)})"


def _signed(delta: float | None) -> str:
    return f"{delta:+.{DIGITS}f}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


_TEX_MARKS = {T_MARK: r"\ast", RANDOMISATION_MARK: r"\dagger"}
_TEX_SPECIAL = {
    RANDOMISATION_MARK: r"\dag{}",
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def _tex(text: str) -> str:
    return "".join(_TEX_SPECIAL.get(character, character) for character in _one_line(text))


def _tex_line(cells: Sequence[str]) -> str:
    return f"{' & '.join(map(_tex, cells))} \\\\"
