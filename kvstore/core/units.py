"""Sizes and durations as people write them: `8GiB`, `500MB`, `7d`, `1.5s`.

Covers: text to bytes or seconds and back. Does not cover: what a setting may be, see `kvstore/config.py`.
"""

import re
from fractions import Fraction

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZES = {name.lower(): factor for name, factor in {"": 1, "B": 1, **_DECIMAL, **_BINARY}.items()}
_DURATIONS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
# Beyond these a number is a slip of the keyboard, and int64 arithmetic further down would overflow.
_MAX_BYTES = 1 << 60
_MAX_SECONDS = 1e10


def parse_size(text: str) -> int:
    """Return the bytes that `text` names; a bare number is bytes. Raises ValueError for anything else.

    `8GiB` is binary and `8GB` decimal, as the units say; `8G` is refused, since readers disagree on it.
    """
    value, unit = _split(text)
    if unit.lower() not in _SIZES:
        raise ValueError(f"{text!r} is no size: the unit must be B, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    size = value * _SIZES[unit.lower()]
    if size > _MAX_BYTES or size != int(size):
        raise ValueError(f"{text!r} is no size: not a whole number of bytes, or over 1024 PiB")
    return int(size)


def parse_duration(text: str) -> float:
    """Return the seconds that `text` names; a bare number is seconds. Raises ValueError for anything else."""
    value, unit = _split(text)
    if unit.lower() not in _DURATIONS:
        raise ValueError(f"{text!r} is no duration: the unit must be ms, s, m, h, d or w")
    factor = _DURATIONS[unit.lower()]
    if value * Fraction(factor) > _MAX_SECONDS:
        raise ValueError(f"{text!r} is no duration: it is over 300 years")
    return float(value) * factor


def format_size(num_bytes: int) -> str:
    """Return an exact binary size where there is one (`8GiB`), else plain bytes; `parse_size` undoes it."""
    for name, factor in reversed(_BINARY.items()):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{name}"
    return f"{num_bytes}B"


def approximate_size(num_bytes: float) -> str:
    """Return a size for people, three significant digits: `1.46 GiB`."""
    for name, factor in reversed(_BINARY.items()):
        if abs(num_bytes) >= factor:
            return (
                f"{num_bytes / factor:.3g} {name}"
                if abs(num_bytes) < 1000 * factor
                else f"{num_bytes / factor:.0f} {name}"
            )
    return f"{num_bytes:.0f} B"


def format_duration(duration_s: float) -> str:
    """Return an exact duration in the largest fitting unit (`7d`, `1.5s`); `parse_duration` undoes it."""
    for name in ("w", "d", "h", "m"):
        if duration_s and duration_s % _DURATIONS[name] == 0:
            # Weeks only from two on: nobody looks for "1w" where the manual says "7d".
            if name == "w" and duration_s < 2 * _DURATIONS["w"]:
                continue
            return f"{int(duration_s // _DURATIONS[name])}{name}"
    return f"{duration_s:.15g}s"


def _split(text: str) -> tuple[Fraction, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    number, unit = match.groups()
    # Exact: as a float 1.07 TB is no whole number of bytes.
    return Fraction(number), unit
