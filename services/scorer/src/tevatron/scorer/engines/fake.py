"""A deterministic engine without a model, for tests: no command line offers it.

The score of a prompt is a hash of its token ids, between -10 and 10.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Sequence

from tevatron.scorer.engines.base import EngineInfo


class FakeEngine:
    """Scores by hash, after `seconds_per_token`."""

    def __init__(
        self,
        *,
        seconds_per_token: float = 0.0,
        max_batch_tokens: int = 2048,
        vocab_size: int | None = None,
    ) -> None:
        self._seconds_per_token = seconds_per_token
        self._info = EngineInfo(
            dtype="float32",
            device="cpu",
            max_batch_tokens=max_batch_tokens,
            vocab_size=vocab_size,
        )

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return a score that depends on nothing but the prompt."""
        if self._seconds_per_token:
            time.sleep(self._seconds_per_token * sum(len(ids) for ids in token_ids))
        return [zlib.crc32(array("q", ids).tobytes()) / 2**32 * 20 - 10 for ids in token_ids]

    def info(self) -> EngineInfo:
        """Describe the engine."""
        return self._info
