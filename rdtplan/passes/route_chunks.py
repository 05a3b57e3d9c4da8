"""Routing: which owner serves each chunk to each worker.

Worker c of a deployment C workers wide binds the owners [c*P//C, (c+1)*P//C) of the P in a class when P >= C,
else owner c*P//C. Within that block the gather group index rotates, so a worker spreads its groups over its
block and a chunk still has one producer:

>>> [producer_index(c, 2, 4, group) for c in (0, 1) for group in (0, 1)]
[0, 1, 2, 3]
>>> [producer_index(c, 4, 2, 7) for c in range(4)]
[0, 0, 1, 1]

The carve is per deployment: worker w of every replica uses the same producer for the same name.
"""

from __future__ import annotations

from attrs import evolve

from rdtplan.passes.draft import Draft, RouteDraft


def producer_index(worker: int, workers: int, owners: int, group: int) -> int:
    """Index into the owner class that serves `group` to `worker`."""
    lo = worker * owners // workers
    hi = (worker + 1) * owners // workers if owners >= workers else lo + 1
    return lo + group % (hi - lo)


def route_chunks(draft: Draft) -> Draft:
    """Choose the producer of every chunk of every worker of one deployment."""
    assert draft.ownership is not None
    workers = draft.topology.workers_per_replica
    routes: list[RouteDraft] = []
    for worker, program in enumerate(draft.program_of):
        chunks = draft.programs[program].chunks
        assert chunks is not None
        owner_sets = (draft.ownership.classes[c] for c in chunks.owner_class)
        producers = tuple(
            owners[producer_index(worker, workers, len(owners), group)]
            for owners, group in zip(owner_sets, chunks.group, strict=True)
        )
        routes.append(RouteDraft(producers))
    return evolve(draft, routes=tuple(routes))
