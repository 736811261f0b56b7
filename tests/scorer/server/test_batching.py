"""The queue without HTTP: who is served when, what is let in, and that no score is lost or given to another."""

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tevatron.core.errors import BusyError, UnavailableError
from tevatron.scorer.engines.fake import FakeEngine
from tevatron.scorer.server.batching import Batcher, EngineFailedError, Limits, NotFiniteError
from tevatron.scorer.server.meters import Meters

CALL = 1000


class _Steps:
    """An engine that does one call for each `step`, and remembers them."""

    def __init__(self):
        self.calls = []
        self._gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def step(self, calls=1):
        self._gate.release(calls)

    def score(self, token_ids):
        self.entered.release()
        assert self._gate.acquire(timeout=20)
        self.calls.append([ids[0] for ids in token_ids])
        return FakeEngine().score(token_ids)

    async def wait_for_call(self):
        assert await self.is_called(within_s=10)

    async def is_called(self, *, within_s=0.2):
        # In a thread: a loop that waits here would start no call.
        return await asyncio.to_thread(self.entered.acquire, timeout=within_s)


def _run(
    test, engine, *, max_queue_tokens=10**6, deadline_s=30.0, call=CALL, wait_s=0.0, queues=False
):
    async def inner():
        with ThreadPoolExecutor(8) as threads:
            batcher = Batcher(
                engine,
                threads=threads,
                pass_tokens=call,
                queues_calls=queues,
                wait_s=wait_s,
                limits=Limits(max_queue_tokens=max_queue_tokens, deadline_s=deadline_s),
                meters=Meters(),
            )
            try:
                await test(batcher)
            finally:
                getattr(engine, "step", lambda _: None)(1000)
                await batcher.aclose()

    asyncio.run(inner())


def _without_engine(*, queues=False, wait_s=0.0):
    """A batcher that runs nothing: what is decided of calls is asked of it."""
    batcher = Batcher(
        FakeEngine(),
        threads=ThreadPoolExecutor(1),
        pass_tokens=CALL,
        queues_calls=queues,
        wait_s=wait_s,
        limits=Limits(max_queue_tokens=10**9, deadline_s=30),
        meters=Meters(),
    )
    batcher._task.cancel()
    return batcher


def _prompts(name, count, tokens):
    """Prompts whose first token says whose they are."""
    return [[name, place, *[7] * (tokens - 2)] for place in range(count)]


def _ask(batcher, prompts):
    """Let a request in with all its prompts, and return the task that waits for its scores."""
    ticket = batcher.admit(
        num_prompts=len(prompts), expected_tokens=sum(len(one) for one in prompts)
    )
    ticket.add(prompts)

    async def wait():
        try:
            return await ticket.scores()
        finally:
            ticket.close()

    return asyncio.create_task(wait())


def test_a_small_request_waits_for_the_call_that_runs_and_no_longer():
    engine = _Steps()

    async def test(batcher):
        big = _ask(batcher, _prompts(1, 5000, 100))
        await engine.wait_for_call()
        small = _ask(batcher, _prompts(2, 2, 100))
        engine.step()
        await engine.wait_for_call()
        engine.step()
        assert await asyncio.wait_for(small, 5) == FakeEngine().score(_prompts(2, 2, 100))
        assert engine.calls[0] == [1] * 10
        assert engine.calls[1].count(2) == 2
        assert engine.calls[1].count(1) == 8
        big.cancel()
        engine.step(10)

    _run(test, engine, max_queue_tokens=10**9)


def test_the_next_call_is_with_the_engine_before_the_first_is_done():
    engine = _Steps()

    async def test(batcher):
        asked = [_ask(batcher, _prompts(name, 10, 100)) for name in (1, 2, 3)]
        await engine.wait_for_call()
        await engine.wait_for_call()
        # Two are with the engine, and a third has to wait for one of them.
        assert not await engine.is_called()
        engine.step()
        await engine.wait_for_call()
        engine.step(2)
        for name, task in zip((1, 2, 3), asked, strict=True):
            assert await asyncio.wait_for(task, 5) == FakeEngine().score(_prompts(name, 10, 100))
        assert sorted(len(call) for call in engine.calls) == [10, 10, 10]

    _run(test, engine, queues=True)


def test_an_engine_that_does_not_queue_has_one_call_at_a_time():
    engine = _Steps()

    async def test(batcher):
        asked = _ask(batcher, _prompts(1, 20, 100))
        await engine.wait_for_call()
        assert not await engine.is_called()
        engine.step(2)
        await asked

    _run(test, engine, wait_s=100.0)


def test_a_fast_engine_has_more_calls_of_whole_passes():
    engine = _Steps()

    async def test(batcher):
        engine.step()
        await _ask(batcher, _prompts(1, 10, 100))
        await engine.wait_for_call()
        asked = _ask(batcher, _prompts(2, 45, 100))
        for _ in range(4):
            await engine.wait_for_call()
        # Half a pass waits for others, until the engine has less than two calls.
        assert not await engine.is_called()
        engine.step(5)
        await asked
        assert sorted(len(call) for call in engine.calls) == [5, 10, 10, 10, 10, 10]

    _run(test, engine, queues=True, wait_s=100.0)


@pytest.mark.parametrize(("tokens_per_s", "calls"), [(100, 2), (2999, 2), (3000, 3), (5500, 5)])
def test_the_engine_has_as_many_calls_as_it_is_through_with_in_time(tokens_per_s, calls):
    """A second, here."""

    async def decide():
        batcher = _without_engine(queues=True, wait_s=1.0)
        batcher._spent_tokens, batcher._spent_s = tokens_per_s, 1.0
        ticket = batcher.admit(num_prompts=100, expected_tokens=10_000)
        ticket.add(_prompts(1, 100, 100))
        while batcher._is_wanted():
            assert len(batcher._take()) == CALL // 100
            batcher._running += 1
        return batcher._running

    assert asyncio.run(decide()) == calls


def test_calls_that_end_together_say_nothing_false_of_the_speed(monkeypatch):
    """Each second one is done as soon as the one before it, which took two seconds: a second a call."""
    ends = [end + late for end in range(2, 42, 2) for late in (0, 1e-6)]

    async def decide():
        batcher = _without_engine()
        ticket = batcher.admit(num_prompts=10, expected_tokens=1000)
        ticket.add(_prompts(1, 10, 100))
        call = batcher._take()
        clock = iter(ends)
        monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
        for end in ends:
            batcher._count(call, started=int(end) - 2)
        return batcher._expected_s(CALL)

    assert asyncio.run(decide()) == pytest.approx(1.0, rel=0.2)


def test_requests_of_one_size_end_one_after_the_other():
    engine = _Steps()

    async def test(batcher):
        asked = [_ask(batcher, _prompts(name, 20, 100)) for name in (1, 2, 3)]
        engine.step(6)
        await asyncio.gather(*asked)
        assert engine.calls == [[name] * 10 for name in (1, 1, 2, 2, 3, 3)]

    _run(test, engine)


def _with_equal_shares(sizes, joins, call):
    """Return the call after which each request would be through, had each call been shared equally; by hand."""
    left, ends = {}, {}
    number = 0
    while len(ends) < len(sizes):
        left |= {name: sizes[name] for name, join in joins.items() if join == number}
        number += 1
        tokens = float(call)
        while left and tokens > 1e-9:
            each = min(tokens / len(left), min(left.values()))
            tokens -= each * len(left)
            left = {name: size - each for name, size in left.items()}
            for name in [name for name, size in left.items() if size <= 1e-9]:
                ends[name] = number
                del left[name]
    return ends


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_through_later_than_with_equal_shares(seed):
    draw = random.Random(seed)
    counts = {name: draw.choice([1, 2, 30, 100]) for name in range(1, 25)}
    joins = {name: draw.randrange(40) if name > 1 else 0 for name in counts}
    sizes = {name: count * 100 for name, count in counts.items()}

    async def decide():
        batcher = _without_engine()
        ends, left = {}, dict(counts)
        for number in range(400):
            for name, join in joins.items():
                if join == number:
                    ticket = batcher.admit(num_prompts=counts[name], expected_tokens=sizes[name])
                    ticket.add(_prompts(name, counts[name], 100))
            for ticket, prompt in batcher._take():
                ticket.settle(prompt, 0.0)
                left[prompt.ids[0]] -= 1
                if left[prompt.ids[0]] == 0:
                    ends[prompt.ids[0]] = number + 1
                    ticket.close()
        return ends

    found = asyncio.run(decide())
    fair = _with_equal_shares(sizes, joins, CALL)
    assert set(found) == set(counts)
    assert {name: end for name, end in found.items() if end > fair[name]} == {}
    assert sum(found.values()) < sum(fair.values())


def test_a_stream_of_small_requests_does_not_starve_a_large_one():
    engine = _Steps()

    async def test(batcher):
        big = _ask(batcher, _prompts(1, 200, 100))
        await engine.wait_for_call()
        small = []
        for _ in range(100):
            # They take four fifths of the calls.
            small += [_ask(batcher, _prompts(2, 2, 100)) for _ in range(4)]
            engine.step()
            await engine.wait_for_call()
        assert big.done()
        engine.step(1000)
        await asyncio.gather(*small, big)

    _run(test, engine)


def test_a_request_that_takes_more_than_expected_has_no_larger_share():
    async def test(batcher):
        honest = batcher.admit(num_prompts=10, expected_tokens=1000)
        other = batcher.admit(num_prompts=10, expected_tokens=10)
        other.add(_prompts(2, 10, 200))
        assert (honest.fair_end, other.fair_end) == (1000, 2000)
        honest.add(_prompts(1, 5, 100))
        assert honest.fair_end == 1000
        honest.add(_prompts(1, 5, 20))
        assert honest.fair_end == 600
        honest.close()
        other.close()

    _run(test, _Steps())


def test_a_request_shares_again_where_more_comes_than_was_expected():
    async def test(batcher):
        ticket = batcher.admit(num_prompts=2, expected_tokens=10)
        ticket.add(_prompts(1, 1, 100))
        await asyncio.sleep(0)
        assert not batcher._sharing
        ticket.add(_prompts(1, 1, 100))
        assert batcher._sharing == {ticket}
        ticket.close()

    _run(test, _Steps())


@pytest.mark.parametrize("queues", [False, True])
def test_no_score_is_lost_doubled_or_given_to_another(queues):
    class Uneven(FakeEngine):
        """Of two calls at a time the second may be done first."""

        def score(self, token_ids):
            time.sleep(draw.random() / 100)
            return super().score(token_ids)

    draw = random.Random(3)
    prompts = [
        [[draw.randrange(1000) for _ in range(draw.randint(1, 400))] for _ in range(size)]
        for size in (1, 700, 3, 50, 1, 200, 9, 90)
    ]

    async def test(batcher):
        got = await asyncio.gather(*[_ask(batcher, one) for one in prompts])
        assert got == [FakeEngine().score(one) for one in prompts]
        assert batcher.queue_tokens == 0

    _run(test, Uneven(), max_queue_tokens=10**9, wait_s=100.0, queues=queues)


def test_a_prompt_that_is_longer_than_a_call_runs_alone():
    engine = _Steps()

    async def test(batcher):
        engine.step(10)
        await _ask(batcher, [*_prompts(1, 1, 100), *_prompts(2, 1, 3000), *_prompts(3, 1, 100)])
        assert engine.calls == [[1], [2], [3]]

    _run(test, engine)


def test_a_full_queue_refuses_and_lets_one_in_where_none_waits():
    engine = _Steps()

    async def test(batcher):
        first = _ask(batcher, _prompts(1, 50, 100))
        with pytest.raises(BusyError, match="5000 tokens wait, 100 more would be over 3000"):
            batcher.admit(num_prompts=1, expected_tokens=100)
        engine.step(10)
        await first
        batcher.admit(num_prompts=1, expected_tokens=100).close()

    _run(test, engine, max_queue_tokens=3000)


def test_what_is_announced_counts_before_it_is_rendered():
    async def test(batcher):
        ticket = batcher.admit(num_prompts=10, expected_tokens=2500)
        assert batcher.queue_tokens == 2500
        with pytest.raises(BusyError):
            batcher.admit(num_prompts=1, expected_tokens=600)
        ticket.close()
        assert batcher.queue_tokens == 0

    _run(test, FakeEngine(), max_queue_tokens=3000)


def test_a_request_that_leaves_is_not_scored_any_more():
    engine = _Steps()

    async def test(batcher):
        gone = _ask(batcher, _prompts(1, 50, 100))
        await engine.wait_for_call()
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert batcher.queue_tokens == 0
        other = _ask(batcher, _prompts(2, 3, 100))
        engine.step(2)
        await other
        assert engine.calls == [[1] * 10, [2] * 3]

    _run(test, engine)


def test_a_deadline_ends_a_request_in_the_middle_and_says_how_far_it_came():
    engine = _Steps()

    async def test(batcher):
        asked = _ask(batcher, _prompts(1, 50, 100))
        engine.step(2)
        with pytest.raises(BusyError, match=r"20 of 50 pairs were scored within 0\.5 s"):
            await asked
        assert batcher.queue_tokens == 0

    _run(test, engine, deadline_s=0.5)


def test_a_request_whose_one_call_fails_has_the_error_though_another_ends_well():
    class Moody(_Steps):
        def score(self, token_ids):
            scores = super().score(token_ids)
            if token_ids[0][1] == 0:
                raise RuntimeError("out of memory")
            return scores

    engine = Moody()

    async def test(batcher):
        asked = _ask(batcher, _prompts(1, 20, 100))
        await engine.wait_for_call()
        await engine.wait_for_call()
        engine.step(2)
        with pytest.raises(EngineFailedError, match="out of memory"):
            await asked
        engine.step()
        assert await _ask(batcher, [[2, 1, 7]]) == FakeEngine().score([[2, 1, 7]])
        assert not batcher.is_broken

    _run(test, engine, queues=True)


def test_a_failure_of_the_engine_fails_who_was_in_that_call_only():
    class Fails(FakeEngine):
        def score(self, token_ids):
            if any(ids[0] == 1 for ids in token_ids):
                raise RuntimeError("out of memory")
            return super().score(token_ids)

    async def test(batcher):
        asked = [_ask(batcher, _prompts(name, 1, 1000)) for name in (1, 2)]
        bad, good = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(bad, EngineFailedError)
        assert "RuntimeError: out of memory" in str(bad)
        assert good == FakeEngine().score(_prompts(2, 1, 1000))
        assert not batcher.is_broken

    _run(test, Fails())


@pytest.mark.parametrize("scores", [[1.0], [1.0, 2.0, 3.0]])
def test_an_engine_that_gives_another_number_of_scores_is_an_error(scores):
    class Wrong(FakeEngine):
        def score(self, token_ids):
            return scores

    async def test(batcher):
        with pytest.raises(EngineFailedError, match=f"2 prompts, but {len(scores)} scores"):
            await _ask(batcher, _prompts(1, 2, 10))

    _run(test, Wrong())


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_no_number_names_its_prompt(score):
    class Sick(FakeEngine):
        def score(self, token_ids):
            return [score if ids[1] == 2 else 0.0 for ids in token_ids]

    async def test(batcher):
        with pytest.raises(NotFiniteError) as caught:
            await _ask(batcher, _prompts(1, 4, 10))
        assert caught.value.index == 2

    _run(test, Sick())


def test_closing_fails_what_is_left_and_lets_nobody_in():
    engine = _Steps()

    async def test(batcher):
        asked = _ask(batcher, _prompts(1, 50, 100))
        await engine.wait_for_call()
        engine.step()
        await batcher.aclose()
        with pytest.raises(UnavailableError, match="shutting down"):
            await asked
        with pytest.raises(UnavailableError, match="shutting down"):
            batcher.admit(num_prompts=1, expected_tokens=1)

    _run(test, engine)
