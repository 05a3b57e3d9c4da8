"""Memory: what the plan will allocate, to the byte, before anything runs.

A receive slot is the largest packed chunk (or the presize floor) rounded up to 256 MiB; a consumer allocates
`min(S, streams) * K` of them. A producer keeps K serve slots for every distinct consumer plan it serves
(replicas that run the same plan share) and at most `gather_lookahead + 1` of its groups.
"""

from __future__ import annotations

from attrs import evolve

from rdtplan.ir.plan import MemoryForecast
from rdtplan.passes.draft import Draft

ROUNDING = 256 << 20
"""Bytes a receive slot is rounded up to."""


def slot_nbytes(largest_chunk: int, presize_gb: float) -> int:
    """Bytes of one receive slot.

    >>> slot_nbytes(300 << 20, 0.0) >> 20
    512
    """
    floor = max(largest_chunk, int(presize_gb * (1 << 30)), 1)
    return -(-floor // ROUNDING) * ROUNDING


def forecast_memory(draft: Draft) -> Draft:
    """Predict receive pools, serve rings and resident gather memory."""
    settings, topology = draft.settings, draft.topology
    largest = 0
    streams: list[int] = []
    for program in draft.programs:
        assert program.chunks is not None
        largest = max(largest, *program.chunks.nbytes, 0)
        streams.append(len(set(program.chunks.stream)))
    slot = slot_nbytes(largest, settings.buffer_presize_gb)
    pool = tuple(
        max(1, min(settings.stages_in_flight, streams[p])) * settings.num_rdt_buffers * slot for p in draft.program_of
    )
    rings = tuple(
        settings.num_rdt_buffers
        * sum(s.slot_nbytes for s in producer.servings if s.consumer_id < topology.workers_per_replica)
        for producer in draft.producers
    )
    resident = tuple(
        (settings.gather_lookahead + 1) * max(producer.group_nbytes, default=0) for producer in draft.producers
    )
    return evolve(draft, memory=MemoryForecast(slot, pool * topology.replicas, rings, resident))
