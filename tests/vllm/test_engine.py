"""The engine against transformers' own logits in fp32: every model, order, batch, cache state and tensor parallelism."""

import random
import statistics
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.vllm.models import MAX_LENGTH, SHAPE, own_scores, save_model
from vllm import SamplingParams

from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError, InputError
from tevatron.core.prompts import AnswerIds
from tevatron.scorer.engines import vllm
from tevatron.scorer.engines.base import EngineFlags, EngineOptions
from tevatron.scorer.engines.vllm_steps import Steps

TOLERANCE = 1e-4
IDS = AnswerIds(yes=290, no=20)
"""In different halves of a vocabulary of 300: two ranks hold one each."""


def _prompts():
    """Four queries of 140 tokens, longer than a block of the cache, with eight passages each, up to the longest prompt."""
    draw = random.Random(0)
    queries = [[draw.randrange(256) for _ in range(140)] for _ in range(4)]
    lengths = [1, 2, 17, 60, 61, 100, 150, MAX_LENGTH - 140]
    pairs = [
        query + [draw.randrange(256) for _ in range(length)]
        for length in lengths
        for query in queries
    ]
    draw.shuffle(pairs)
    return pairs


PROMPTS = _prompts()


@pytest.fixture(scope="module", autouse=True)
def small_cache():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "_CPU_CACHE_BYTES", 2**26)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = save_model(tmp_path_factory.mktemp("models") / kind, kind)
        return made[kind]

    return folder


@pytest.fixture(scope="module")
def engines(folders):
    made = {}

    def engine(kind, **options):
        key = (kind, *options.items())
        if key not in made:
            made[key] = vllm.VllmEngine(_options(folders(kind), **options))
        return made[key]

    return engine


def _options(folder, *, dtype="float32", head=Head.YES_NO, **flags):
    return EngineOptions(
        model=folder,
        head=head,
        answer_ids=IDS,
        max_length=MAX_LENGTH,
        dtype=dtype,
        flags=EngineFlags(**flags),
    )


def test_more_positions_than_the_model_has_are_refused(folders):
    # First of all: vLLM keeps the variables that it read for the life of the process.
    with pytest.raises(ConfigError, match=rf"(?s)vLLM cannot serve .*max_model_len.*{MAX_LENGTH}"):
        vllm.VllmEngine(_options(folders("qwen3"), max_model_len=MAX_LENGTH + 2))


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        # Before the dense ones: vLLM makes the groups of a process once, and expert groups with a MoE model only.
        ("qwen3_moe", {}),
        ("qwen3", {}),
        ("llama", {}),  # tied embeddings
        ("qwen3", {"tensor_parallel_size": 2}),
        ("llama", {"tensor_parallel_size": 2}),
    ],
)
def test_scores_are_transformers_own(engines, folders, kind, flags):
    expected = own_scores(folders(kind), PROMPTS, IDS)
    assert statistics.pstdev(expected) > 1
    engine = engines(kind, **flags)
    assert engine.info().vocab_size == SHAPE["vocab_size"]
    assert engine.score(PROMPTS) == pytest.approx(expected, abs=TOLERANCE)


def test_scores_depend_on_neither_order_nor_batch(engines):
    engine = engines("qwen3")
    scores = engine.score(PROMPTS)
    assert engine.score(PROMPTS[::-1])[::-1] == pytest.approx(scores, abs=TOLERANCE)
    assert engine.score([*PROMPTS[3:5], PROMPTS[4]]) == pytest.approx(
        [*scores[3:5], scores[4]], abs=TOLERANCE
    )
    assert engine.score([]) == []


def test_the_prefix_cache_changes_nothing(engines):
    engine = engines("qwen3")

    def alone(prompt):
        engine.llm.reset_prefix_cache()
        return engine.score([prompt])[0]

    without = [alone(prompt) for prompt in PROMPTS]
    engine.llm.reset_prefix_cache()
    assert engine.score(PROMPTS) == pytest.approx(without, abs=TOLERANCE)
    # In whole blocks of 128 tokens: all but the first of a query find its block.
    engine.llm.reset_prefix_cache()
    outputs = engine.steps.outputs(sorted(PROMPTS))
    assert sum(output.prefill_stats.num_cached_tokens for output in outputs) == 4 * 7 * 128


def test_calls_of_two_threads_share_the_steps(engines):
    engine = engines("qwen3")
    expected = engine.score(PROMPTS)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(engine.score, [PROMPTS[at::8] for at in range(8)] * 4))
    for at, scores in enumerate(found):
        assert scores == pytest.approx(expected[at % 8 :: 8], abs=TOLERANCE)


def test_a_prompt_that_vllm_refuses_fails_its_own_call(engines, monkeypatch):
    """And a step that fails fails those that wait for it, not those that come later."""
    engine = engines("qwen3")
    core = engine.llm.llm_engine.engine_core
    expected = engine.score(PROMPTS[:3])
    add = core.add_request

    def refuse_long_ones(request):
        if len(request.prompt_token_ids) > len(PROMPTS[0]):
            raise ValueError("too long")
        add(request)

    with monkeypatch.context() as patch:
        patch.setattr(core, "add_request", refuse_long_ones)
        with pytest.raises(ValueError, match="too long"):
            engine.score([*PROMPTS[:3], [*PROMPTS[0], 5]])
    assert engine.score(PROMPTS[:3]) == pytest.approx(expected, abs=TOLERANCE)
    with monkeypatch.context() as patch:
        patch.setattr(core, "get_output", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.score(PROMPTS[:3])
    assert engine.score(PROMPTS[:3]) == pytest.approx(expected, abs=TOLERANCE)


def test_the_thread_goes_with_its_steps():
    """What vLLM holds is let go then: the thread does not keep it."""

    class Core:
        pass

    engine = SimpleNamespace(
        engine_core=Core(),
        input_processor=SimpleNamespace(process_inputs=lambda *_, **__: None),
        get_supported_tasks=tuple,
    )
    held = weakref.ref(engine.engine_core)
    steps = Steps(engine, SamplingParams())
    del engine
    assert held() is not None
    (thread,) = [one for one in threading.enumerate() if one.name == "vllm-steps"][-1:]
    del steps
    thread.join(10)
    assert not thread.is_alive()
    assert held() is None


def test_half_precision_does_not_tie(engines, folders):
    expected = own_scores(folders("llama"), PROMPTS, IDS)
    engine = engines("llama", dtype="bfloat16")
    scores = engine.score(PROMPTS)
    assert engine.info().dtype == "bfloat16"
    assert len(set(scores)) == len(scores)
    assert scores == pytest.approx(expected, abs=statistics.pstdev(expected) / 2)


def test_a_missing_logit_is_an_error_that_names_the_token(engines):
    engine = engines("qwen3")
    params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=[290], detokenize=False)
    [output] = Steps(engine.llm.llm_engine, params).outputs([[1, 2, 3]])
    with pytest.raises(vllm.MissingTokenError, match="no logit for token 20, the answer 'no'"):
        vllm._score(output, IDS)


@pytest.mark.parametrize("length", [0, MAX_LENGTH + 1])
def test_a_prompt_that_cannot_be_scored_is_an_error_and_the_engine_goes_on(engines, length):
    engine = engines("qwen3")
    scores = engine.score(PROMPTS[:4])
    with pytest.raises(InputError, match=f"of 1 to {MAX_LENGTH} tokens, got one of {length}"):
        engine.score([*PROMPTS[:3], [1] * length])
    assert engine.score(PROMPTS[:4]) == pytest.approx(scores, abs=TOLERANCE)


def test_the_other_head_is_refused(folders, tmp_path):
    with pytest.raises(ConfigError, match="serves head 'yes_no', not 'seq_cls'; use --backend hf"):
        vllm.VllmEngine(_options(folders("qwen3"), head=Head.SEQ_CLS))
    for path in folders("qwen3").iterdir():
        if path.name != "model.safetensors":
            (tmp_path / path.name).symlink_to(path)
    tensors = load_file(folders("qwen3") / "model.safetensors")
    save_file(
        {**tensors, "score.weight": torch.zeros(1, 64)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ConfigError, match=r"holds 'score.weight', a seq_cls checkpoint"):
        vllm.VllmEngine(_options(tmp_path))


@pytest.mark.parametrize(("size", "expected"), [(16, "ray"), (8, None), (None, None)])
def test_a_model_over_more_gpus_than_the_node_has_goes_through_ray(
    folders, monkeypatch, size, expected
):
    class AskedError(ValueError):
        pass

    def ask(**arguments):
        raise AskedError(str(arguments.get("distributed_executor_backend")))

    monkeypatch.setattr(vllm, "LLM", ask)
    monkeypatch.setattr(vllm, "_HAS_GPU", True)
    monkeypatch.setattr(vllm, "_DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    options = _options(folders("qwen3"), tensor_parallel_size=size)
    with pytest.raises(ConfigError, match=f": {expected}$"):
        vllm.VllmEngine(options)
