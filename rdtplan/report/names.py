"""Dotted names folded over their indices: 12,032 expert weights are one line."""

from __future__ import annotations

import re
from collections.abc import Iterable

from attrs import frozen

from rdtplan.report.units import ranges

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


@frozen(slots=True)
class Folded:
    """Names that differ only in their indices."""

    pattern: str
    """The name with a range for every index that varies."""
    count: int
    first: str
    """One of the names, in full."""


def template(name: str) -> str:
    """A name without its indices, which are what layers and experts differ in.

    >>> template("model.layers.3.mlp.experts.7.w1")
    'model.layers.*.mlp.experts.*.w1'
    """
    return _INDEX.sub("*", name)


def fold_names(names: Iterable[str]) -> list[Folded]:
    """Names grouped by template, in order of appearance.

    >>> [(f.pattern, f.count) for f in fold_names(["a.0.w", "a.1.w", "a.2.w", "b"])]
    [('a.{0-2}.w', 3), ('b', 1)]
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(template(name), []).append(name)
    return [Folded(_pattern(shape, members), len(members), members[0]) for shape, members in found.items()]


def _pattern(shape: str, members: list[str]) -> str:
    if "*" not in shape:
        return members[0]
    columns = zip(*(_INDEX.findall(name) for name in members), strict=True)
    out = shape
    for column in columns:
        indices = set(map(int, column))
        text = str(next(iter(indices))) if len(indices) == 1 else "{" + ranges(indices, 4) + "}"
        out = out.replace("*", text, 1)
    return out
