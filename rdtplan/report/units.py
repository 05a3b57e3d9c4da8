"""Numbers for people, and the numbers people write."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import pairwise

from rdtplan.errors import InputError

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTES |= {f"{k}i": 1 << (10 * i) for i, k in enumerate("kmgt", 1)}
LARGEST_RATE = 1e18
LONGEST_S = 1e9
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def human_bytes(n: float) -> str:
    """Bytes in binary units, three digits.

    >>> human_bytes(1536)
    '1.5 KiB'
    """
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{int(value)} B" if unit == "B" else f"{value:.{0 if value >= 100 else 1}f} {unit}"
        value /= 1024
    raise AssertionError


def human_seconds(seconds: float) -> str:
    """Seconds in the unit that keeps three digits.

    >>> human_seconds(0.0123), human_seconds(3.5)
    ('12.3 ms', '3.50 s')
    """
    if not seconds:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size or unit == "us":
            value = seconds / size
            return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f} {unit}"
    raise AssertionError


def human_rate(bytes_per_second: float) -> str:
    """Decimal gigabytes a second, as links are sold.

    >>> human_rate(50e9)
    '50.0 GB/s'
    """
    return "unlimited" if math.isinf(bytes_per_second) else f"{bytes_per_second / 1e9:.1f} GB/s"


def parse_rate(text: str, option: str) -> float:
    """Bytes a second. A capital B is bytes, a small b bits; no unit means GB/s. InputError RDT108 on anything else.

    From one byte a second to a billion GB/s, beyond which nothing can be reckoned with.

    >>> parse_rate("50", "x"), parse_rate("400Gb/s", "x"), parse_rate("2 GiB/s", "x")
    (50000000000.0, 50000000000.0, 2147483648.0)
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(?:([kmgtKMGT]?i?)([Bb])(?:/s|ps)?)?\s*", text)
    rate = 0.0
    if found is not None:
        unit = 1e9 if found[3] is None else _BYTES[found[2].lower()] / (8 if found[3] == "b" else 1)
        rate = _number(found[1]) * unit
    if not 1 <= rate <= LARGEST_RATE:
        raise InputError(
            f"{option}: expected a rate such as 50GB/s or 400Gb/s, from 1 B/s to 1e9 GB/s, found {text!r}",
            code="RDT108",
        )
    return rate


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # 1.2.3
        return math.nan


def parse_seconds(text: str, option: str) -> float:
    """Seconds, of `20us`, `5ms`, `0.1s` or a plain number, a billion at most. InputError RDT108 on anything else."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(s|ms|us|µs|ns|)\s*", text)
    seconds = math.nan if found is None else _number(found[1]) * _SECONDS[found[2]]
    if not seconds <= LONGEST_S:
        raise InputError(
            f"{option}: expected a time such as 20us or 5ms, of at most 1e9 s, found {text!r}", code="RDT108"
        )
    return seconds


def ranges(numbers: Iterable[int], limit: int = 6) -> str:
    """Ascending numbers as runs, the first `limit` of them; numbers at even steps by their first two and the last.

    >>> ranges([0, 1, 2, 3, 7, 9, 10]), ranges([0, 2, 4, 6])
    ('0-3, 7, 9-10', '0, 2, ... 6')
    """
    ordered = sorted(set(numbers))
    steps = {b - a for a, b in pairwise(ordered)}
    if len(ordered) > 3 and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]}, {ordered[1]}, ... {ordered[-1]}"
    runs: list[list[int]] = []
    for n in ordered:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:limit])
    return shown if len(runs) <= limit else f"{shown}, ... {runs[-1][1]}"


def numbered(noun: str, numbers: Iterable[int]) -> str:
    """Things by their numbers.

    >>> numbered("worker", [3]), numbered("worker", [0, 1, 2])
    ('worker 3', 'workers 0-2')
    """
    which = sorted(set(numbers))
    return f"{noun if len(which) == 1 else noun + 's'} {ranges(which) or 'none'}"


def plural(n: int, noun: str) -> str:
    """`1 chunk`, `2 chunks`, `2 copies`."""
    if n == 1:
        return f"1 {noun}"
    return f"{n:,} {noun[:-1]}ies" if noun.endswith("y") else f"{n:,} {noun}s"
