"""What passes are rounded up to; the graphs themselves are tried where there is a GPU."""

import itertools
import random
from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import pytest
import torch
from tests.support.tiny_model import tiny_folder

from tevatron.core.contracts.train import Head
from tevatron.core.nn import graphs
from tevatron.core.nn.attention import Segments
from tevatron.core.nn.graphs import Graphs, Shape, is_capturable
from tevatron.core.nn.loading import load_model


def _shape(*lengths, max_tokens=16384):
    return Shape.of(Segments.of(lengths, torch.device("cpu")), max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ((1,), (32, 1, 128)),
        ((150,) * 107, (16384, 128, 256)),
        ((512,) * 32, (16384, 32, 512)),
        ((100,) * 41, (4608, 64, 128)),
        ((20_000,), (20_480, 1, 32_768)),
    ],
)
def test_what_a_pass_is_rounded_up_to(lengths, shape):
    assert _shape(*lengths) == shape


def test_a_pass_is_not_rounded_up_beyond_the_budget():
    assert _shape(*[100] * 99, max_tokens=10_000).num_tokens == 10_000


def test_a_shape_has_room_for_its_pass_and_little_more():
    draw = random.Random(0)
    shapes = set()
    for _ in range(3000):
        lengths = [draw.randint(1, 512) for _ in range(draw.randint(1, 60))]
        shape = _shape(*lengths)
        shapes.add(shape)
        assert sum(lengths) <= shape.num_tokens <= max(1.125 * sum(lengths) + 1, sum(lengths) + 31)
        assert len(lengths) <= shape.num_prompts < 2 * len(lengths)
        assert max(lengths) <= shape.longest
    assert len(shapes) < 150


def test_a_model_on_a_cpu_has_no_graphs(tmp_path):
    folder = tiny_folder(tmp_path / "model", "qwen3")
    model = load_model(folder, Head.YES_NO, dtype="bfloat16", device="cpu")
    assert not is_capturable(model)


@pytest.fixture
def counted(monkeypatch):
    """Captures and replays of a model whose last hidden state is the prompt's last token and the sum of its positions."""
    counts = {"launched": 0, "captured": 0, "replayed": 0}
    capturing = []

    def last_hidden(model, *, input_ids, position_ids, segments):
        counts["launched"] += not capturing
        ends = segments.cu_seq_lens.tolist()
        assert len(input_ids[0]) >= ends[-1]
        assert max(b - a for a, b in itertools.pairwise(ends)) <= segments.longest
        rows = [
            [input_ids[0, end - 1].item(), position_ids[0, start:end].sum().item()]
            for start, end in itertools.pairwise(ends)
        ]
        return torch.tensor(rows, dtype=torch.float64)

    class Graph:
        def replay(self):
            counts["replayed"] += 1
            counts["launched"] -= 1
            self.hidden_PH.copy_(self.launch())

    @contextmanager
    def graph(made, **kwargs):
        counts["captured"] += 1
        capturing.append(made)
        yield
        capturing.clear()

    class Pass(graphs._Pass):
        def launch(self):
            hidden_PH = super().launch()
            for made in capturing:
                made.launch, made.hidden_PH = super().launch, hidden_PH
            return hidden_PH

    monkeypatch.setattr(graphs, "last_hidden", last_hidden)
    monkeypatch.setattr(graphs, "_Pass", Pass)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    for name in ("device", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    return counts


def _run(run, draw):
    """Run a pass of random prompts and see what comes of it."""
    lengths = tuple(draw.randint(1, 40) for _ in range(draw.randint(1, 9)))
    ids = [[draw.randrange(1000) for _ in range(length)] for length in lengths]
    found = run(
        input_ids=torch.tensor([[token for one in ids for token in one]]),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        segments=Segments.of(lengths, torch.device("cpu")),
    )
    assert found.tolist() == [[one[-1], sum(range(len(one)))] for one in ids]


def test_each_pass_has_its_own_prompts_whatever_ran_before_it(counted):
    run, draw = Graphs(Mock(device=torch.device("cpu")), max_tokens=200), random.Random(1)
    for _ in range(400):
        _run(run, draw)
    assert counted["replayed"] > 250
    assert counted["launched"] + counted["replayed"] == 400
    assert 10 < counted["captured"] <= 64


def test_a_shape_beyond_the_most_is_launched_as_it_is(counted, monkeypatch):
    monkeypatch.setattr(graphs, "_MOST", 3)
    run, draw = Graphs(Mock(device=torch.device("cpu")), max_tokens=200), random.Random(1)
    for _ in range(100):
        _run(run, draw)
    assert counted["captured"] == 3
    assert counted["launched"] > 50


def test_a_capture_that_fails_is_told_once_and_its_passes_are_launched(
    counted, monkeypatch, caplog
):
    @contextmanager
    def fails(made, **kwargs):
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    run, draw = Graphs(Mock(device=torch.device("cpu")), max_tokens=200), random.Random(1)
    for _ in range(100):
        _run(run, draw)
    (told,) = caplog.records
    assert "no more passes are captured, for it failed: operation failed" in told.getMessage()
    assert counted["replayed"] == 0
