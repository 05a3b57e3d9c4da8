"""Sequence numbers: `seq` counts the chunks that one consumer pulls from one producer, in issue order.

Producers (0, 1, 0, 0) give seq (0, 0, 1, 2). It selects the producer's serve slot (`seq % K`), so slots are
reused in issue order and never in execution order.
"""

from __future__ import annotations

from collections import Counter

from attrs import evolve

from rdtplan.ir.manifest import Ints
from rdtplan.passes.draft import Draft


def sequence(producers: Ints) -> Ints:
    """Running count of each producer."""
    seen: Counter[int] = Counter()
    out: list[int] = []
    for p in producers:
        out.append(seen[p])
        seen[p] += 1
    return tuple(out)


def number_sequences(draft: Draft) -> Draft:
    """Set `seq` of every chunk of every worker."""
    return evolve(draft, routes=tuple(evolve(r, seq=sequence(r.producer)) for r in draft.routes))
