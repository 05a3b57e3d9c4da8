"""Long columns as parts of their own: layers, experts and ranks repeat, and what repeats is stored once.

Two steps, both textbook, both exact:

1. *Dictionary.* A column with few distinct values is stored as codes, numbered by first appearance, and the table of
   its values. Tensor-parallel ranks number their regions differently but use them in the same order, so they share the
   codes and differ in the table alone.
2. *Deltas and copies.* A column of integers is written as the differences of neighbours, and of these a run that
   occurred before as `(literals taken before it, distance back, length)`. A layer like the one before costs three
   numbers, and so does 0, 1, 2, ...

Reading is bounded: a column states its length, which no list in it may exceed, before anything is expanded.
"""

from __future__ import annotations

from itertools import accumulate, islice
from typing import Any, cast

Ints = tuple[int, ...]

LONG = 256
"""Columns of this many entries and more are parts of their own; shorter ones stand where they belong."""
MAX_ENTRIES = 1 << 22
"""No column is longer. The largest models have a tenth of that many slices a worker."""
_SHORTEST = 4
"""A copy of fewer deltas costs more than it saves."""
_INT64 = 1 << 63


def dictionary(column: tuple[Any, ...]) -> tuple[Ints, list[Any]] | None:
    """`(codes, table)` with `column[i] == table[codes[i]]`, None when the column is better stored as it is.

    >>> dictionary(("b", "a", "b", "b", "a", "b", "b", "b"))
    ((0, 1, 0, 0, 1, 0, 0, 0), ['b', 'a'])
    >>> dictionary((0, 1, 1, 0, 0, 0, 1, 1)) is None
    True
    """
    codes = {value: code for code, value in enumerate(dict.fromkeys(column))}
    if 4 * len(codes) > len(column) or all(value == code for value, code in codes.items()):
        return None
    return tuple(map(codes.__getitem__, column)), list(codes)


def pack(column: Ints) -> dict[str, Any]:
    """A column of integers in JSON-ready form; the same column always gives the same form.

    >>> pack((7, 8, 9, 10, 11, 12, 13))
    {'copies': [2, 1, 5], 'length': 7, 'literals': [7, 1]}
    """
    deltas = [b - a for a, b in zip((0, *column), column, strict=False)]
    literals: list[int] = []
    copies: list[int] = []
    seen: dict[tuple[int, ...], int] = {}
    at = taken = 0
    n = len(deltas)
    while at < n:
        gram = tuple(deltas[at : at + _SHORTEST])
        start = seen.get(gram) if len(gram) == _SHORTEST else None
        seen[gram] = at
        if start is None:
            literals.append(deltas[at])
            at += 1
            continue
        length = _match(deltas, start, at)
        copies += [len(literals) - taken, at - start, length]
        taken = len(literals)
        for i in range(at + 1, min(at + length, n - _SHORTEST + 1)):
            seen[tuple(deltas[i : i + _SHORTEST])] = i
        at += length
    return {"copies": copies, "length": n, "literals": literals}


def _match(deltas: list[int], start: int, at: int) -> int:
    """How many deltas from `at` on are those from `start` on; the two runs may overlap."""
    length = _SHORTEST
    n = len(deltas)
    while at + length < n and deltas[start + length] == deltas[at + length]:
        length += 1
    return length


def unpack(body: Any) -> Ints:
    """The column that `pack` wrote. TypeError when the body is none, before it is expanded."""
    if type(body) is not dict:
        raise TypeError(f"expected a packed column, found {type(body).__name__} {str(body)[:60]!r}")
    length, literals, copies = (body.get(name) for name in ("length", "literals", "copies"))
    if type(length) is not int or not 0 <= length <= MAX_ENTRIES:
        raise TypeError(f"length: expected 0 to {MAX_ENTRIES:,}, found {str(length)[:60]!r}")
    for name, numbers in (("literals", literals), ("copies", copies)):
        if type(numbers) is not list or not set(map(type, numbers)) <= {int}:
            raise TypeError(f"{name}: expected an array of ints, found {str(numbers)[:60]!r}")
    deltas = cast(list[int], literals)
    column = tuple(accumulate(_expand(length, deltas, cast(list[int], copies))))
    widest = max(map(abs, deltas), default=0) * length
    if widest >= _INT64 and not (min(column) >= -_INT64 and max(column) < _INT64):
        raise TypeError("a value does not fit 64 bits")
    return column


def _expand(length: int, literals: list[int], copies: list[int]) -> list[int]:
    if len(copies) % 3:
        raise TypeError("copies: expected three numbers each")
    out: list[int] = []
    rest = iter(literals)
    numbers = iter(copies)
    taken = 0
    for take, distance, count in zip(numbers, numbers, numbers, strict=True):
        taken += max(take, 0)
        have = len(out) + take
        if take < 0 or taken > len(literals) or not 0 < distance <= have or count < 1 or have + count > length:
            raise TypeError(
                f"copies: {[take, distance, count]} is not possible after {len(out):,} of {length:,} entries"
            )
        out += islice(rest, take)
        start = len(out) - distance
        if distance >= count:
            out += out[start : start + count]
        else:
            out += (out[start:] * (count // distance + 1))[:count]
    out += rest
    if len(out) != length:
        raise TypeError(f"length: {length:,} is written, the column has {len(out):,} entries")
    return out


def look_up(codes: Ints, table: Any, item: type) -> tuple[Any, ...]:
    """Values of a dictionary column.

    TypeError when a code is outside the table, an entry of the table has no code, or the table holds other things.
    """
    if type(table) is not list or not set(map(type, table)) <= {item}:
        raise TypeError(f"of: expected an array of {item.__name__}, found {str(table)[:60]!r}")
    used = set(codes)
    if used != set(range(len(table))):
        least, most = min(used, default=0), max(used, default=-1)
        raise TypeError(f"of: {len(used)} codes, {least} to {most}, for a table of {len(table)}")
    return tuple(map(table.__getitem__, codes))
