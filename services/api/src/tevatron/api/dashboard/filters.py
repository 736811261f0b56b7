"""How times, sizes and numbers are written on a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

from markupsafe import Markup


def moment(time: datetime | None) -> Markup:
    """Write a time in UTC."""
    if time is None:
        return Markup("&ndash;")
    utc = time.astimezone(UTC)
    return Markup('<time datetime="{}">{} UTC</time>').format(
        utc.isoformat(timespec="seconds"), utc.strftime("%Y-%m-%d %H:%M:%S")
    )


def duration(seconds: float | None) -> str:
    """Write a length of time with its two largest units."""
    if seconds is None:
        return "\N{EN DASH}"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def size(num_bytes: float) -> str:
    """Write a number of bytes in binary units."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def number(value: object) -> str:
    """Write a number with four digits that count, anything else as it is."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "\N{EN DASH}" if value is None else str(value)


def score(value: float | None) -> str:
    """Write a metric or a model's score with four decimals."""
    return "\N{EN DASH}" if value is None else f"{value:.4f}"


def delta(value: float) -> str:
    """Write a difference with its sign."""
    return f"{value:+.4f}"


def pretty(value: object) -> str:
    """Write JSON in lines."""
    return json.dumps(value, indent=2, ensure_ascii=False)


FILTERS: dict[str, Callable[..., object]] = {
    "delta": delta,
    "duration": duration,
    "moment": moment,
    "number": number,
    "pretty": pretty,
    "score": score,
    "size": size,
}
