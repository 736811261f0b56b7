"""The pairs of one piece of work as a line of chunks: taken, given back, asked of a second backend, done once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tevatron.core.contracts.scores import Candidate
from tevatron.core.errors import TevatronError

Key = TypeVar("Key")
"""What the work calls a pair."""


class LostPairError(TevatronError):
    """Not every pair has one score: a fault of ours."""

    code = "lost_pair"


@dataclass(slots=True, eq=False)
class Chunk(Generic[Key]):
    """Pairs of one request."""

    keys: list[Key]
    candidates: list[Candidate]
    taken: float = field(default_factory=time.monotonic)
    attempts: dict[asyncio.Task[list[float]], str] = field(default_factory=dict)
    """Requests in flight, with the backend's URL."""
    holders: int = 1
    """Slots that work on it: two where a backend is slow and another one helps."""
    is_done: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    def split(self, size: int) -> tuple[Chunk[Key], Chunk[Key]]:
        """Return the first `size` pairs and the rest."""
        return (
            Chunk(self.keys[:size], self.candidates[:size]),
            Chunk(self.keys[size:], self.candidates[size:]),
        )


class Line(Generic[Key]):
    """Pairs in the order in which they come; what was given back goes first."""

    def __init__(
        self,
        pairs: Iterable[tuple[Key, Candidate]],
        sink: Callable[[Sequence[Key], Sequence[float]], None],
    ) -> None:
        self._pairs = iter(pairs)
        self._sink = sink
        self._returned: deque[Chunk[Key]] = deque()
        self._in_flight: dict[Chunk[Key], None] = {}
        self._exhausted = False
        self._num_taken = self._num_done = 0

    @property
    def finished(self) -> bool:
        """Whether every pair has its score."""
        return self._exhausted and not self._returned and not self._in_flight

    def check_complete(self) -> None:
        """Raise `LostPairError` unless as many scores came out as pairs went in."""
        if not self.finished or self._num_taken != self._num_done:
            raise LostPairError(
                f"{self._num_taken} pairs were sent to scorers, {self._num_done} scores came back"
            )

    def take(self, size: int) -> Chunk[Key] | None:
        """Return the next chunk, or nothing: all is done or in the hands of others."""
        chunk = self._again(size) if self._returned else self._fresh(size)
        if chunk is not None:
            chunk.taken, chunk.holders = time.monotonic(), 1
            self._in_flight[chunk] = None
        return chunk

    def straggler(self, url: str, *, older_than_s: float, limit: int) -> Chunk[Key] | None:
        """Return the chunk that has been with one other backend for longest, if that is too long."""
        for chunk in self._in_flight:
            if time.monotonic() - chunk.taken < older_than_s:
                # They stand in the order in which they were taken.
                return None
            elsewhere = url not in chunk.attempts.values() and len(chunk.attempts) == 1
            if chunk.holders == 1 and elsewhere and len(chunk) <= limit:
                chunk.holders = 2
                return chunk
        return None

    def drop(self, chunk: Chunk[Key], *, parts: Sequence[Chunk[Key]] = ()) -> None:
        """Let a chunk go that was not scored; it returns to the line where nobody else works on it."""
        chunk.holders -= 1
        if chunk.is_done or chunk.holders:
            return
        del self._in_flight[chunk]
        self._returned.extend(parts or (chunk,))

    def done(self, chunk: Chunk[Key], scores: Sequence[float]) -> None:
        """Hand the scores over, once, and end what another backend still does for the chunk."""
        if chunk.is_done:
            return
        chunk.is_done = True
        del self._in_flight[chunk]
        for attempt in chunk.attempts:
            attempt.cancel()
        self._num_done += len(chunk)
        self._sink(chunk.keys, scores)

    def _again(self, size: int) -> Chunk[Key]:
        chunk = self._returned.popleft()
        if len(chunk) > size:
            chunk, rest = chunk.split(size)
            self._returned.appendleft(rest)
        return chunk

    def _fresh(self, size: int) -> Chunk[Key] | None:
        chunk: Chunk[Key] = Chunk([], [])
        for key, candidate in self._pairs:
            chunk.keys.append(key)
            chunk.candidates.append(candidate)
            if len(chunk) >= size:
                break
        else:
            self._exhausted = True
        self._num_taken += len(chunk)
        return chunk if chunk.keys else None
