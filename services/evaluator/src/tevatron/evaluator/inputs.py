"""Which file belongs to which data set of a benchmark: a pattern with `{dataset}` in it, and paths that win over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tevatron.core.errors import ConfigError, InputError
from tevatron.evaluator.benchmarks import Benchmark

_PLACEHOLDER = "{dataset}"
_ENDINGS = ("", ".gz", ".zst")


def find_inputs(
    benchmark: Benchmark,
    names: Sequence[str],
    *,
    pattern: str | None,
    overrides: Mapping[str, Path],
    allow_partial: bool,
) -> dict[str, Path]:
    """Return each data set's file, those of `names` or all; files that are not there are an error unless partial.

    Args:
        pattern: Path with the literal `{dataset}` in it.
        overrides: Paths that win over the pattern.
    """
    if pattern is not None and _PLACEHOLDER not in pattern:
        raise ConfigError(f"expected {_PLACEHOLDER} in the pattern, got '{pattern}'")
    for name in overrides:
        benchmark.dataset(name)
    wanted = [benchmark.dataset(name).name for name in names or benchmark.names()]
    found: dict[str, Path] = {}
    missing: list[str] = []
    for name in dict.fromkeys(wanted):
        path = overrides.get(name)
        if path is None and pattern is not None:
            path = Path(pattern.replace(_PLACEHOLDER, name)).expanduser()
        existing = None if path is None else _existing(path)
        if existing is None:
            missing.append(name if path is None else str(path))
        else:
            found[name] = existing
    if missing and not (allow_partial and found):
        raise InputError(
            f"{len(missing)} of {len(found) + len(missing)} data sets of {benchmark.name} have no file, such as "
            f"{', '.join(missing[:3])}; an average over the others is not the benchmark's (--allow_partial)"
        )
    return found


def _existing(path: Path) -> Path | None:
    return next(
        (found for ending in _ENDINGS if (found := path.with_name(path.name + ending)).is_file()),
        None,
    )
