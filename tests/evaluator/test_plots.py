import re
import struct

import pytest

from tevatron.core.errors import ConfigError
from tevatron.evaluator.differences import differences
from tevatron.evaluator.plots import bars, waterfall
from tevatron.evaluator.table import Cell, Row, Table

TABLE = Table(
    title="BEIR, ndcg@10",
    corner="data set",
    columns=["BM25", "ours"],
    rows=[Row(f"set {n}", [Cell(n / 10), Cell(None if n == 2 else n / 12)]) for n in range(1, 7)],
)
FOUND = differences({"a": 0.1, "b": 0.5, "c": 0.5}, {"a": 0.9, "b": 0.2, "c": 0.5})


def test_png_has_the_size_that_was_asked_for(tmp_path):
    bars(TABLE, tmp_path / "new" / "bars.png")
    data = (tmp_path / "new" / "bars.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG")
    assert (width, height) == (900, 675)


def test_svg_is_the_same_each_time_and_names_rows_and_columns(tmp_path):
    for name in ("a.svg", "b.svg"):
        bars(TABLE, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert (tmp_path / "b.svg").read_text() == text
    comments = re.findall("<!-- (.*?) -->", text)
    assert {"set 1", "set 6", "BM25", "ours", "BEIR, ndcg@10"} <= set(comments)


def test_waterfall_tells_won_and_lost(tmp_path):
    waterfall(FOUND, tmp_path / "w.svg", title="ours against BM25")
    comments = re.findall("<!-- (.*?) -->", (tmp_path / "w.svg").read_text())
    assert "ours against BM25" in comments
    assert "won 1 (+0.8000 on average), lost 1 (-0.3000 on average), same 1" in comments


def test_ten_thousand_queries_make_a_small_file(tmp_path):
    before = {f"q{n}": 0.5 for n in range(10_000)}
    after = {f"q{n}": n / 10_000 for n in range(10_000)}
    waterfall(differences(before, after), tmp_path / "w.png", title="t")
    assert (tmp_path / "w.png").stat().st_size < 200_000


def test_another_ending_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"written as \.png or \.svg, got 'bars\.pdf'"):
        bars(TABLE, tmp_path / "bars.pdf")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'tevatron-evaluator\[plots\]'"):
        bars(TABLE, tmp_path / "bars.png")
