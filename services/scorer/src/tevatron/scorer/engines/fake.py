"""A deterministic engine without a model: for tests, and for trying the server's behaviour under load.

The score of a prompt is a hash of its token ids, between -10 and 10; one of more than `max_batch_tokens` is nothing
special. It knows no model, so a contract is never proved by it.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Sequence

from tevatron.scorer.engines.base import EngineInfo, EngineOptions


class FakeEngine:
    """Scores by hash, after `seconds_per_token`."""

    def __init__(
        self, options: EngineOptions | None = None, *, seconds_per_token: float = 0.0
    ) -> None:
        self._dtype = (options.dtype if options else None) or "float32"
        self._seconds_per_token = seconds_per_token

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return a score that depends on nothing but the prompt."""
        if self._seconds_per_token:
            time.sleep(self._seconds_per_token * sum(len(ids) for ids in token_ids))
        return [zlib.crc32(array("q", ids).tobytes()) / 2**32 * 20 - 10 for ids in token_ids]

    def info(self) -> EngineInfo:
        """Describe the engine."""
        return EngineInfo(dtype=self._dtype, device="cpu")
