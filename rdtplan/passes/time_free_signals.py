"""Free signals: when a consumer tells every owner of a gather group that it is done with it.

With the group's last chunk on this consumer, or at sync start (-1) when it pulls nothing of the group.
Exactly one signal a group and owner, so a group with N live consumers is freed by its N-th signal.
"""

from __future__ import annotations

from attrs import evolve

from rdtplan.passes.draft import Draft, ProgramDraft


def time_free_signals(draft: Draft) -> Draft:
    """Set `free_after`: a chunk index for every gather group."""
    return evolve(draft, programs=tuple(_time(p, len(draft.groups)) for p in draft.programs))


def _time(program: ProgramDraft, n_groups: int) -> ProgramDraft:
    assert program.chunks is not None
    after = [-1] * n_groups
    for chunk, group in enumerate(program.chunks.group):
        after[group] = chunk
    return evolve(program, free_after=tuple(after))
