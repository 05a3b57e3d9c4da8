"""Dotted names folded over their indices: 12,032 expert weights are one line.

A fold is exact: a pattern stands for all names that its ranges make, and for no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import prod

from attrs import frozen

from rdtplan.report.units import plural, ranges

_INDEX = re.compile(r"(?<=\.)(?:0|[1-9]\d*)(?=\.|$)")
_RANGE = re.compile(r"\{([^{}]*)\}")
RUNS_SHOWN = 4
"""Runs of indices that text shows of one range."""
PATTERNS_SHOWN = 12
"""Patterns that one line of text holds."""


@frozen(slots=True)
class Folded:
    """Names that differ only in their indices, and are all that there are with such indices."""

    pattern: str
    """The name with a range for every index that varies."""
    count: int


def template(name: str) -> str:
    """A name without its indices, which are what layers and experts differ in.

    >>> template("model.layers.3.mlp.experts.7.w1")
    'model.layers.*.mlp.experts.*.w1'
    """
    return _INDEX.sub("*", name)


def indices(name: str) -> tuple[int, ...]:
    """What `template` leaves out.

    >>> indices("model.layers.3.mlp.experts.7.w1")
    (3, 7)
    """
    return tuple(map(int, _INDEX.findall(name)))


def fold_names(names: Iterable[str]) -> list[Folded]:
    """Names grouped by template, in order of appearance, each group in as many patterns as it takes.

    >>> [(f.pattern, f.count) for f in fold_names(["a.0.w", "a.1.w", "a.2.w", "b"])]
    [('a.{0-2}.w', 3), ('b', 1)]
    >>> [f.pattern for f in fold_names(["a.0.b.0", "a.0.b.1", "a.1.b.1", "a.1.b.0", "a.2.b.1"])]
    ['a.{0-1}.b.{0-1}', 'a.2.b.1']
    """
    found: dict[str, set[tuple[int, ...]]] = {}
    for name in names:
        found.setdefault(template(name), set()).add(indices(name))
    out: list[Folded] = []
    for shape, members in found.items():
        for columns in _products(sorted(members)):
            pattern = shape
            for column in columns:
                pattern = pattern.replace("*", _range(column), 1)
            out.append(Folded(pattern, prod(map(len, columns))))
    return out


def _products(rows: list[tuple[int, ...]]) -> list[list[list[int]]]:
    """Ascending rows of indices as products of columns, disjoint and together all of them."""
    if not rows[0]:
        return [[]]
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for head, members in groupby(rows, lambda row: row[0]):
        alike.setdefault(tuple(row[1:] for row in members), []).append(head)
    return [[heads, *columns] for tails, heads in alike.items() for columns in _products(list(tails))]


def _range(column: list[int]) -> str:
    return str(column[0]) if len(column) == 1 else "{" + ranges(column, len(column)) + "}"


def brief(pattern: str) -> str:
    """A pattern for a line of text: of a range in many pieces the first ones, and three dots.

    >>> brief("a.{0, 2, 5, 9-11, 14, 19}.w")
    'a.{0, 2, 5, 9-11, ... 19}.w'
    """

    def short(found: re.Match[str]) -> str:
        runs = found[1].split(", ")
        return found[0] if len(runs) <= RUNS_SHOWN else f"{{{', '.join(runs[:RUNS_SHOWN])}, ... {runs[-1]}}}"

    return _RANGE.sub(short, pattern)


def patterns_text(patterns: Sequence[str], separator: str = ", ") -> str:
    """Patterns in a line of text: the first ones, and how many more."""
    shown = [brief(p) for p in patterns[:PATTERNS_SHOWN]]
    rest = len(patterns) - len(shown)
    return separator.join([*shown, f"... and {plural(rest, 'pattern')} more"] if rest else shown)


def names_text(names: Iterable[str], separator: str = ", ") -> str:
    """Names folded into a line of text."""
    return patterns_text([f.pattern for f in fold_names(names)], separator)
