from __future__ import annotations

import threading

from tevatron.api.loop import Loop


def test_a_step_that_fails_is_tried_again(caplog):
    stopping = threading.Event()
    calls: list[int] = []

    def step() -> None:
        calls.append(len(calls))
        if len(calls) < 3:
            raise ConnectionError("the database is away")
        stopping.set()

    loop = Loop("mine", step=step, pause=lambda: None, stopping=stopping, retry_s=0.01)
    loop.start()
    loop.join()
    assert calls == [0, 1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "mine failed 1 times in a row; it tries again",
        "mine failed 2 times in a row; it tries again",
    ]
    assert "the database is away" in caplog.text


def test_a_stop_ends_the_wait_between_failures():
    stopping = threading.Event()
    failed = threading.Event()

    def step() -> None:
        failed.set()
        raise ConnectionError

    loop = Loop("mine", step=step, pause=lambda: None, stopping=stopping, retry_s=3600.0)
    loop.start()
    failed.wait()
    stopping.set()
    loop.join()
    assert not loop.is_alive
