"""The Hugging Face engine on a GPU: packed with the flash kernel, compiled or not, against transformers' own logits."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.support.tiny_model import tiny_folder
from transformers import AutoModelForCausalLM

from tevatron.core.contracts.train import Head
from tevatron.core.nn.forward import YesNoHead, score_packed
from tevatron.core.nn.loading import load_model
from tevatron.core.nn.probing import PromptScorer
from tevatron.core.prompts import AnswerIds
from tevatron.scorer.engines import EngineFlags, EngineOptions, get_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
IDS = AnswerIds(yes=259, no=261)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"), "qwen3", hidden_size=128)


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(1)
    return [[draw.randrange(300) for _ in range(draw.randint(1, 300))] for _ in range(200)]


def _engine(folder, dtype, **flags):
    options = EngineOptions(
        model=folder,
        head=Head.YES_NO,
        answer_ids=IDS,
        max_length=512,
        dtype=dtype,
        flags=EngineFlags(device="cuda", **flags),
    )
    return get_engine("hf").make(options)


def _own(folder, prompts):
    """Score with transformers' own forward pass in fp64 on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0, -1] for ids in prompts]
    return [float(one[IDS.yes] - one[IDS.no]) for one in logits]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-3), ("float16", 0.05), ("bfloat16", 0.4)]
)
def test_scores_in_any_batch_and_order(folder, prompts, dtype, tolerance, compiled):
    own = _own(folder, prompts)
    spread = torch.tensor(own).std().item()
    places = list(range(len(prompts)))
    for budget in (1000, 16384):
        random.Random(budget).shuffle(places)
        engine = _engine(folder, dtype, max_batch_tokens=budget, compile=compiled)
        got = engine.score([prompts[at] for at in places])
        differences = [abs(one - own[at]) for one, at in zip(got, places, strict=True)]
        assert max(differences) < tolerance * max(1.0, spread)


def test_passes_of_other_shapes_are_not_compiled_again(folder, prompts):
    torch._dynamo.reset()
    engine = _engine(folder, "bfloat16", compile=True)
    engine.score(prompts)
    engine.score(prompts[:37])
    with torch._dynamo.config.patch(error_on_recompile=True):
        engine.score(prompts[3:150])
        engine.score(prompts[::-1])


def test_a_pass_is_launched_without_waiting_for_the_gpu(folder, prompts):
    """Else the next one is launched when the GPU has nothing to do any more."""
    model = load_model(folder, Head.YES_NO, dtype="bfloat16", device="cuda")
    head = YesNoHead(yes=IDS.yes, no=IDS.no)
    with torch.no_grad():
        expected = score_packed(model, prompts[:20], head)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = score_packed(model, prompts[:20], head)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


@pytest.fixture
def replays(monkeypatch):
    """How many passes were replayed so far."""
    count = [0]
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph):
        count[0] += 1
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return count


def _plain(folder, dtype):
    """Score without graphs, in passes of one prompt."""
    model = load_model(folder, Head.YES_NO, dtype=dtype, device="cuda")
    return PromptScorer(model, YesNoHead(yes=IDS.yes, no=IDS.no), max_tokens=1)


@pytest.mark.parametrize("compiled", [False, True])
def test_replayed_passes_of_all_shapes_score_as_others_do(folder, prompts, replays, compiled):
    expected = _plain(folder, "bfloat16").score(prompts)
    spread = torch.tensor(expected).std().item()
    engine = _engine(folder, "bfloat16", max_batch_tokens=2048, compile=compiled)
    draw = random.Random(2)
    for _ in range(200):
        places = draw.sample(range(len(prompts)), draw.choice([1, 2, 3, 5, 8, 13, 60]))
        got = engine.score([prompts[at] for at in places])
        differences = [abs(one - expected[at]) for one, at in zip(got, places, strict=True)]
        assert max(differences) < 0.4 * max(1.0, spread)
    assert replays[0] > 200


def test_a_shape_is_captured_as_it_comes_again(folder, prompts, replays):
    engine = _engine(folder, "bfloat16")
    scores = [engine.score(prompts[:20]) for _ in range(4)]
    assert replays == [2]
    assert all(one == pytest.approx(scores[0], abs=1e-2) for one in scores)
    assert scores[2] == scores[3]


def test_calls_of_many_threads_have_their_own_scores(folder, prompts, replays):
    expected = _plain(folder, "bfloat16").score(prompts)
    engine = _engine(folder, "bfloat16", max_batch_tokens=2048)
    calls = [prompts[start : start + 10] for start in range(0, 200, 10)] * 10
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(engine.score, calls))
    for place, scores in enumerate(found):
        start = 10 * (place % 20)
        assert scores == pytest.approx(expected[start : start + 10], abs=0.5)
    assert replays[0] > 100


def test_a_model_that_looks_at_its_passes_has_no_graphs(tmp_path, prompts, replays):
    """Dynamic positions depend on the longest prompt, which the process reads from the GPU."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = tiny_folder(tmp_path / "model", "llama", hidden_size=128, rope_parameters=rope)
    own = _own(folder, prompts)
    spread = torch.tensor(own).std().item()
    engine = _engine(folder, "bfloat16")
    for _ in range(3):
        got = engine.score(prompts)
        assert max(abs(a - b) for a, b in zip(got, own, strict=True)) < 0.4 * max(1.0, spread)
    assert replays == [0]
