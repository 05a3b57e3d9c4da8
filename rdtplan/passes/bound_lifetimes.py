"""Module lifetime: a leaf module is materialized on its first chunk and completed on its last.

A fused `qkv_proj` whose three sources arrive in chunks 4 and 5 has lifetime (4, 5). Fixed here, by
construction, so that the runtime keeps no counters that could drift. A module that only constants reach (a rank whose
part of the vocabulary is all padding) lives with the first chunk: (0, 0).
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve

from rdtplan.ir.manifest import Ints
from rdtplan.ir.plan import Lifetimes
from rdtplan.passes.draft import Draft, ProgramDraft


def bound_lifetimes(draft: Draft) -> Draft:
    """First and last chunk of every leaf module a program writes, in order of the first."""
    return evolve(draft, programs=tuple(_bound(p) for p in draft.programs))


def _bound(program: ProgramDraft) -> ProgramDraft:
    assert program.chunks is not None and program.scatters is not None
    trace = program.trace
    modules = trace.parameters.modules
    alone = (modules[p] for p in (*trace.fills.parameters, *trace.operations.parameters))
    found = module_lifetimes(modules, program.scatters.parameter, program.chunks.scatter_end, alone)
    return evolve(program, lifetimes=Lifetimes(*found))


def module_lifetimes(
    modules: Ints, scatter_parameters: Ints, scatter_end: Ints, alone: Iterable[int]
) -> tuple[Ints, Ints, Ints]:
    """(module, first chunk, last chunk) columns; `modules` gives the module of a parameter row.

    `alone` are modules that are written without a scatter.

    >>> module_lifetimes((7, 8, 9, 6), (0, 1, 1, 3), (2, 4), [9])
    ((7, 8, 9, 6), (0, 0, 0, 1), (0, 1, 0, 1))
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    start = 0
    for chunk, end in enumerate(scatter_end):
        for module in dict.fromkeys(map(modules.__getitem__, scatter_parameters[start:end])):
            first.setdefault(module, chunk)
            last[module] = chunk
        start = end
    for module in alone if scatter_end else ():
        first.setdefault(module, 0)
        last.setdefault(module, 0)
    order = sorted(first, key=first.__getitem__)
    return tuple(order), tuple(first[m] for m in order), tuple(last[m] for m in order)
