"""The fixed pairs on which every checkpoint is proved. Never training rows; a change of these texts is a new version.

A contract stores the texts, token ids and scores themselves, so that an old checkpoint stays provable.
"""

from __future__ import annotations

from tevatron.core.errors import PromptError, QueryTooLongError
from tevatron.core.prompts import Pair, Renderer

_LONG = (
    "The lighthouse keeper wrote down the wind, the height of the swell and every sail that passed the point. "
    "In spring the supply boat brought oil, flour and letters, and took the ledger back to the harbour office. "
    "Clerks copied the entries by hand, so that a captain could look up which months were kind to small craft. "
)

PROBE_PAIRS: tuple[Pair, ...] = (
    Pair(
        query="how do bees find flowers",
        text="Bees see ultraviolet marks that guide them to a flower's nectar.",
    ),
    Pair(
        query="how do bees find flowers", text="A cello has four strings and is played with a bow."
    ),
    Pair(
        query="capital of Iceland",
        title="Reykjavik",
        text="Reykjavik is the capital of Iceland and its largest town.",
    ),
    Pair(
        query="capital of Iceland",
        title="Well-Known Half-Truths",
        text="Iceland is green, and Greenland is icy.",
    ),
    Pair(
        query="boil an egg",
        title="-",
        text="Put it into boiling water; wait 6-7 minutes, then cool it down.",
    ),
    Pair(query="What is 12% of 350?", text="12% of 350 = 42 (350 * 0.12)."),
    Pair(
        query="naïve café 東京",
        title="Ünïcödé-Titel",
        text="Кириллица, 漢字, العربية and an emoji 😀 in one line.",
    ),
    Pair(query="lists", text="one\ntwo\n\nthree\tfour   five "),
    Pair(query="only a title", title="Only a title", text=""),
    Pair(query="is this relevant", text="Is the passage relevant to the query?"),
    Pair(query="records of a lighthouse", title="The ledger", text=_LONG * 40),
    Pair(query="tax law of 1920", text=_LONG * 40),
)
"""Pairs that match and do not, an empty title, hyphens, other scripts, white space, passages longer than most limits."""

_FEWEST = 3


def renderable_probes(renderer: Renderer) -> list[Pair]:
    """Return the probes whose query fits the renderer's length; `PromptError` where hardly any does."""
    fitting = []
    for pair in PROBE_PAIRS:
        try:
            renderer.render(pair)
        except QueryTooLongError:
            continue
        fitting.append(pair)
    if len(fitting) < _FEWEST:
        raise PromptError(
            f"max_length {renderer.max_length} is too short for template '{renderer.template.name}': {len(fitting)} of "
            f"{len(PROBE_PAIRS)} probe queries fit, expected at least {_FEWEST}"
        )
    return fitting
