"""vLLM's core, fed by a thread of its own: calls from any thread share its steps.

`LLM.generate` is one call at a time, and a GPU has nothing to do from one call's last step to the next one's first.
Here the prompts of a call are scheduled beside those that another one still waits for. They go to the core as they are,
and its outputs are read as they come: what vLLM's front end does for each prompt (copies of the parameters, a state, a
text, an answer for a user) takes this process four times as long (benchmarks/vllm_prompts.py), and a server has other
things to do.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from queue import SimpleQueue

from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.llm_engine import LLMEngine

logger = logging.getLogger(__name__)


class Steps:
    """Runs an engine's steps for as long as this object lives."""

    def __init__(self, engine: LLMEngine, params: SamplingParams) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        # What vLLM's front end makes of a prompt; another differs in its name, time and ids.
        request = engine.input_processor.process_inputs(
            "", tokens_input([0]), params, supported_tasks=engine.get_supported_tasks()
        )
        run = _Run(engine.engine_core, request, self._calls)
        threading.Thread(target=run.forever, daemon=True, name="vllm-steps").start()
        # The thread knows nothing of this object, which else would never go.
        weakref.finalize(self, self._calls.put, None)

    def outputs(self, prompts: Sequence[list[int]]) -> list[EngineCoreOutput]:
        """Return what vLLM makes of each prompt, in the order given; called from any number of threads."""
        if not prompts:
            return []
        call = _Call(prompts)
        self._calls.put(call)
        return call.done.result()


class _Call:
    """Prompts whose outputs one caller waits for."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        self.prompts = prompts
        self.done: Future[list[EngineCoreOutput]] = Future()
        self._outputs: dict[int, EngineCoreOutput] = {}

    def settle(self, place: int, output: EngineCoreOutput) -> None:
        """Keep an output; the last one gives the answer."""
        self._outputs[place] = output
        if len(self._outputs) == len(self.prompts):
            self.done.set_result([self._outputs[place] for place in range(len(self.prompts))])


class _Run:
    """What the thread has."""

    def __init__(
        self,
        core: EngineCoreClient,
        request: EngineCoreRequest,
        calls: SimpleQueue[_Call | None],
    ) -> None:
        self._core = core
        self._request = request
        self._calls = calls
        self._names = itertools.count()
        self._waiting: dict[str, tuple[_Call, int]] = {}
        """Prompts in the core, by the name that it was given for each."""

    def forever(self) -> None:
        """Take calls and step while there is something to do, until the end is asked for."""
        while True:
            if not self._waiting or not self._calls.empty():
                call = self._calls.get()
                if call is None:
                    return
                self._add(call)
            else:
                self._step()

    def _add(self, call: _Call) -> None:
        try:
            for place, prompt in enumerate(call.prompts):
                name = str(next(self._names))
                request = copy(self._request)
                request.request_id, request.arrival_time = name, time.time()
                request.prompt_token_ids = prompt
                self._core.add_request(request)
                self._waiting[name] = call, place
        except Exception as error:  # noqa: BLE001  whatever it is, the caller has it
            self._drop({call}, error)

    def _step(self) -> None:
        try:
            outputs = self._core.get_output().outputs
        except Exception as error:  # noqa: BLE001  the callers have it
            self._drop({call for call, _ in self._waiting.values()}, error)
            return
        for output in outputs:
            if output.finished and output.request_id in self._waiting:
                call, place = self._waiting.pop(output.request_id)
                call.settle(place, output)

    def _drop(self, calls: set[_Call], error: Exception) -> None:
        """Give up calls with an error, and what the core still has of them."""
        names = [name for name, (call, _) in self._waiting.items() if call in calls]
        for name in names:
            del self._waiting[name]
        for call in calls:
            call.done.set_exception(error)
        try:
            self._core.abort_requests(names)
        except Exception:
            logger.exception("vLLM kept %d prompts that nobody waits for", len(names))
