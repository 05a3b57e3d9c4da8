"""Producer plans: the consumer plans read from the other end.

A producer owns part of some gather groups, waits for one free signal from every consumer for each, and serves
each consumer its chunks by sequence number.
"""

from __future__ import annotations

from attrs import evolve

from rdtplan.ir.plan import ProducerPlan, Serving
from rdtplan.passes.draft import Draft


def serve_chunks(draft: Draft) -> Draft:
    """Derive what every trainer rank publishes and serves."""
    assert draft.ownership is not None
    topology = draft.topology
    own_bytes: list[dict[int, int]] = [{} for _ in range(draft.trainer_ranks)]
    for k, group in enumerate(draft.group_of):
        for rank in draft.ownership.owners(k):
            own_bytes[rank][group] = own_bytes[rank].get(group, 0) + draft.manifest.nbytes(k)
    serves: list[dict[int, list[int]]] = [{} for _ in range(draft.trainer_ranks)]
    for worker, route in enumerate(draft.routes):
        for chunk, producer in enumerate(route.producer):
            serves[producer].setdefault(worker, []).append(chunk)
    producers: list[ProducerPlan] = []
    for rank in range(draft.trainer_ranks):
        servings: list[Serving] = []
        for replica in range(topology.replicas):
            for worker in sorted(serves[rank]):
                chunks = draft.programs[draft.program_of[worker]].chunks
                assert chunks is not None
                mine = tuple(serves[rank][worker])
                largest = max(chunks.nbytes[c] for c in mine)
                servings.append(Serving(replica * topology.workers_per_replica + worker, mine, largest))
        groups = tuple(sorted(own_bytes[rank]))
        producers.append(
            ProducerPlan(
                rank,
                groups,
                (topology.workers,) * len(groups),
                tuple(own_bytes[rank][g] for g in groups),
                tuple(servings),
            )
        )
    return evolve(draft, producers=tuple(producers))
