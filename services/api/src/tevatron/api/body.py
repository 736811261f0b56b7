"""JSON bodies: what JSON allows but Postgres or a number cannot hold is refused here, once for every route.

NUL characters and lone surrogates (jsonb refuses them), NaN and infinities, integers beyond 64 bits, and nesting
that would exhaust the parser's stack. Knows no schema; pydantic sees what is left.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import islice
from typing import NoReturn

from fastapi.routing import APIRoute
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response

from tevatron.api.problems import ProblemError, RefusedError

LARGEST_INT = 2**63 - 1
MAX_FAULTS = 20


class CheckedRequest(Request):
    """A request whose JSON body holds only what can be stored."""

    async def json(self) -> JsonValue:
        """Parse the body, or refuse it with pointers to the faults."""
        return parse_checked(await self.body())


class CheckedRoute(APIRoute):
    """A route that reads its body through `CheckedRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
        """Return FastAPI's own handler, fed with the checked request."""
        handler = super().get_route_handler()

        async def checked(request: Request) -> Response:
            return await handler(CheckedRequest(request.scope, request.receive))

        return checked


def parse_checked(body: bytes) -> JsonValue:
    """Return the value of a JSON text that holds only what can be stored."""
    value = parse(body)
    faults = list(islice(_faults(value), MAX_FAULTS))
    if faults:
        raise RefusedError(
            422,
            f"{faults[0].pointer or '/'}: {faults[0].message}",
            code="invalid_input",
            errors=faults,
        )
    return value


def parse(body: bytes) -> JsonValue:
    """Return the value of a JSON text in UTF-8; anything else is a 422 that says where it breaks off."""
    try:
        text = body.decode()
        value: JsonValue = json.loads(text, parse_constant=_refuse_constant, parse_int=_parse_int)
    except UnicodeDecodeError as error:
        raise _not_json(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise _not_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise _not_json("it is nested too deeply") from error
    return value


def _not_json(why: str) -> RefusedError:
    return RefusedError(422, f"the body is not JSON: {why}", code="invalid_json")


def _refuse_constant(constant: str) -> NoReturn:
    raise _not_json(f"{constant} is not a JSON number")


def _parse_int(digits: str) -> int:
    # Python itself refuses to convert very long digit strings; this names the reason.
    if len(digits) > 20:
        raise _not_json(f"an integer of {len(digits)} characters; expected 64 bits at most")
    return int(digits)


def _faults(root: JsonValue) -> Iterator[ProblemError]:
    """Walk without recursion, and with memory for one path only."""
    open_items = [_items(root)] if isinstance(root, dict | list) else []
    path: list[str | int] = []
    if message := _fault_of(root):
        yield ProblemError(message=message, pointer="")
    while open_items:
        for key, value in open_items[-1]:
            message = (_fault_of(key) if isinstance(key, str) else None) or _fault_of(value)
            if message:
                yield ProblemError(message=message, pointer=_pointer([*path, key]))
            if isinstance(value, dict | list):
                open_items.append(_items(value))
                path.append(key)
                break
        else:
            open_items.pop()
            if path:
                path.pop()


def _items(value: dict[str, JsonValue] | list[JsonValue]) -> Iterator[tuple[str | int, JsonValue]]:
    return iter(value.items()) if isinstance(value, dict) else iter(enumerate(value))


def _fault_of(value: JsonValue) -> str | None:
    if isinstance(value, str):
        if "\0" in value:
            return "text holds a NUL character (\\u0000)"
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            return "text holds a lone surrogate (\\ud800 to \\udfff)"
    elif isinstance(value, float) and not math.isfinite(value):
        return "number is beyond a 64-bit float"
    elif isinstance(value, int) and abs(value) > LARGEST_INT:
        return "integer is beyond 64 bits"
    return None


def _pointer(path: Sequence[str | int]) -> str:
    text = "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in path)
    return text.encode("utf-8", "replace").decode().replace("\0", "?")
