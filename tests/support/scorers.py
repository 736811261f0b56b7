"""Something to serve, for tests of the scorer: the tiny tokenizer, and an engine that a test chooses."""

from tests.support.tiny_model import tiny_tokenizer

from tevatron.core.contracts.scores import ScorerInfo
from tevatron.core.contracts.train import Head
from tevatron.core.prompts import Renderer, get_template
from tevatron.scorer.engines.fake import FakeEngine
from tevatron.scorer.served import Served


def served(engine=None, *, max_length=256, max_batch_tokens=2048, template="tevatron"):
    """Return the tiny tokenizer's renderer with an engine, the fake one by default."""
    engine = engine or FakeEngine()
    renderer = Renderer(get_template(template), tiny_tokenizer(), max_length=max_length)
    ids = renderer.answer_ids
    info = ScorerInfo(
        backend="fake",
        model_name_or_path="fake",
        prompt_template=template,
        head=Head.YES_NO,
        yes_id=ids.yes if ids else None,
        no_id=ids.no if ids else None,
        max_length=max_length,
        dtype=engine.info().dtype,
        max_probe_difference=None,
        versions={},
    )
    return Served(engine=engine, renderer=renderer, info=info, max_batch_tokens=max_batch_tokens)
