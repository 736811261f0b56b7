import csv
import io
import json
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tevatron.evaluator.rendering import Format, markdown, render
from tevatron.evaluator.significance import Comparison
from tevatron.evaluator.table import Cell, Row, Table

TABLE = Table(
    title="A & B_c",
    corner="system",
    columns=["ndcg@10", "map"],
    rows=[
        Row("BM25 100%", [Cell(0.5), Cell(None)]),
        Row(
            "x<y>|z",
            [
                Cell(0.123456789, -0.376543211, is_best=True, tests=Comparison(0.01, 0.2)),
                Cell(0.25, is_partial=True),
            ],
            is_total=True,
        ),
    ],
    notes=["p < .05"],
)


def test_markdown_escapes_pipes_and_shows_what_is_best():
    lines = render(TABLE, Format.MARKDOWN).splitlines()
    assert lines[0] == "**A & B_c**"
    assert [cell.strip() for cell in lines[5].replace("\\|", "/").split("|")[1:-1]] == [
        "x<y>/z",
        "**0.1235\\*** (-0.3765)",
        "0.2500 (partial)",
    ]
    assert lines[-1] == "p < .05"


def test_columns_are_padded_and_aligned():
    assert markdown(["name", "x"], [["a", "1"], ["bcdef", "22"]]) == (
        "| name  |   x |\n| ----- | --: |\n| a     |   1 |\n| bcdef |  22 |\n"
    )


def test_latex_is_booktabs_with_every_special_character_escaped():
    text = render(TABLE, Format.LATEX)
    assert [line for line in text.splitlines() if line.startswith("\\") and "rule" in line] == [
        "\\toprule",
        "\\midrule",
        "\\midrule",
        "\\bottomrule",
    ]
    assert "\\caption{A \\& B\\_c. p \\textless{} .05}" in text
    assert "BM25 100\\% & 0.5000 & - \\\\" in text
    assert (
        "x\\textless{}y\\textgreater{}\\textbar{}z & \\textbf{0.1235}$^{\\ast}$ {\\scriptsize (-0.3765)} & 0.2500 (partial) \\\\"
        in text
    )
    assert text.count("{") == text.count("}")


def has_latex():
    found = shutil.which("pdflatex") and shutil.which("kpsewhich")
    asked = ["kpsewhich", "booktabs.sty"]
    return bool(found) and subprocess.run(asked, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not has_latex(), reason="no pdflatex with booktabs here")
def test_latex_takes_the_table_whatever_stands_in_it(tmp_path):
    odd = r"A & B_c {x} ~^\ <y>|z #1 50% $5 †"
    table = replace(TABLE, title=odd, corner=odd, columns=[odd, "m"], notes=[odd])
    lines = [r"\documentclass{article}", r"\usepackage{booktabs}", r"\begin{document}"]
    lines += [render(table, Format.LATEX), render(TABLE, Format.LATEX), r"\end{document}"]
    (tmp_path / "table.tex").write_text("\n".join(lines))
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-draftmode", "table.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]


def test_csv_keeps_every_digit():
    header, first, second = csv.reader(io.StringIO(render(TABLE, Format.CSV)))
    assert header[:5] == [
        "system",
        "ndcg@10",
        "ndcg@10 delta",
        "ndcg@10 p t-test",
        "ndcg@10 p randomisation",
    ]
    assert first == ["BM25 100%", "0.5", "", "", "", "", "", "", ""]
    assert second[:5] == ["x<y>|z", "0.123456789", "-0.376543211", "0.01", "0.2"]


def test_csv_has_no_empty_columns():
    table = Table(corner="system", columns=["m"], rows=[Row("a", [Cell(1.0)])])
    assert render(table, Format.CSV) == "system,m\na,1.0\n"


def test_json_holds_everything():
    found = json.loads(render(TABLE, Format.JSON))
    assert found["rows"][1]["cells"]["ndcg@10"] == {
        "value": 0.123456789,
        "delta": -0.376543211,
        "is_best": True,
        "is_partial": False,
        "p": {"t_test": 0.01, "randomisation": 0.2},
    }
    assert (found["title"], found["notes"]) == ("A & B_c", ["p < .05"])


class Cells(HTMLParser):
    def __init__(self):
        super().__init__()
        self.rows, self.open, self.resources = [], [], []

    def handle_starttag(self, tag, attributes):
        self.resources += [value for key, value in attributes if key in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "tr" in self.open:
            self.rows[-1][-1] += data


def test_html_is_well_formed_and_needs_no_other_file():
    parser = Cells()
    parser.feed(render(TABLE, Format.HTML))
    assert (parser.open, parser.resources) == ([], [])
    assert parser.rows == [
        ["system", "ndcg@10", "map"],
        ["BM25 100%", "0.5000", "-"],
        ["x<y>|z", "0.1235* -0.3765", "0.2500 (partial)"],
    ]


@pytest.mark.parametrize("form", Format)
def test_a_table_without_title_and_notes_ends_with_a_newline(form):
    text = render(Table(corner="c", columns=["m"], rows=[]), form)
    assert text.endswith("\n")
    assert "None" not in text
