"""Module lifetime: a leaf module is materialized on its first chunk and completed on its last.

A fused `qkv_proj` whose three sources arrive in chunks 4 and 5 has lifetime (4, 5). Fixed here, by
construction, so that the runtime keeps no counters that could drift.
"""

from __future__ import annotations

from attrs import evolve

from rdtplan.ir.plan import Lifetimes
from rdtplan.passes.draft import Draft, ProgramDraft


def bound_lifetimes(draft: Draft) -> Draft:
    """First and last chunk of every leaf module a program writes, in order of the first."""
    return evolve(draft, programs=tuple(_bound(p) for p in draft.programs))


def _bound(program: ProgramDraft) -> ProgramDraft:
    assert program.chunks is not None and program.scatters is not None
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    start = 0
    for chunk, end in enumerate(program.chunks.scatter_end):
        for parameter in program.scatters.parameter[start:end]:
            module = program.trace.parameters.modules[parameter]
            first.setdefault(module, chunk)
            last[module] = chunk
        start = end
    return evolve(program, lifetimes=Lifetimes(tuple(first), tuple(first.values()), tuple(last[m] for m in first)))
