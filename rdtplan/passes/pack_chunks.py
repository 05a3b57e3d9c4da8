"""Chunks: what one pull carries, and where each slice lies in it.

Per gather group, one chunk for each owner class that the worker pulls from, classes ascending. FetchKeys are
deduplicated in record order and laid one after another, each at the next multiple of 16 bytes:

>>> layout([10, 32, 4])
((0, 16, 48), 52)

A chunk above the limit is split into chunks of nearly equal size, none above it.
"""

from __future__ import annotations

from attrs import evolve

from rdtplan.ir.dtypes import itemsize
from rdtplan.ir.manifest import Ints
from rdtplan.ir.plan import ALIGNMENT, Chunks, Keys, Provenance, Scatters
from rdtplan.passes.draft import Draft, ProgramDraft


def layout(sizes: list[int]) -> tuple[Ints, int]:
    """Offsets of slices of `sizes` bytes in one packed buffer, and the bytes of the whole."""
    offsets: list[int] = []
    end = 0
    for n in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + n
    return tuple(offsets), end


def partition(sizes: list[int], limit: int) -> list[int]:
    """Split a run of slices into chunks of at most `limit` packed bytes (0: no limit); the end index of each.

    Sizes stay near the mean: the run is dealt at `total / ceil(total / limit)`, never above the limit, but
    for a slice that alone is above it: it is a chunk of its own.

    >>> partition([40, 40, 40, 40], 100)
    [2, 4]
    """
    padded = [-(-n // ALIGNMENT) * ALIGNMENT for n in sizes]
    total = sum(padded)
    if not limit or total <= limit:
        return [len(sizes)]
    target = total / -(-total // limit)
    ends: list[int] = []
    filled = 0
    for i, n in enumerate(padded):
        if filled and (filled + n > limit or filled + n / 2 > target):
            ends.append(i)
            filled = 0
        filled += n
    return [*ends, len(sizes)]


def pack_chunks(draft: Draft) -> Draft:
    """Deduplicate FetchKeys and lay out every chunk of every program. Streams are set by a later pass."""
    return evolve(draft, programs=tuple(_pack(draft, p) for p in draft.programs))


def _pack(draft: Draft, program: ProgramDraft) -> ProgramDraft:
    assert draft.ownership is not None
    trace = program.trace
    f = trace.fetches
    class_of, group_of = draft.ownership.class_of, draft.group_of
    sizes = [itemsize(d) for d in trace.dtype_table]
    numel = [r.numel for r in trace.regions]
    bins: dict[tuple[int, int], dict[tuple[int, int, int], list[int]]] = {}
    for row, key in enumerate(zip(f.sources, f.source_regions, f.dtypes, strict=True)):
        source = key[0]
        bins.setdefault((group_of[source], class_of[source]), {}).setdefault(key, []).append(row)

    k_source: list[int] = []
    k_region: list[int] = []
    k_dtype: list[int] = []
    k_offset: list[int] = []
    s_key: list[int] = []
    s_row: list[int] = []
    c_group: list[int] = []
    c_class: list[int] = []
    key_end: list[int] = []
    scatter_end: list[int] = []
    c_nbytes: list[int] = []
    for group, owner_class in sorted(bins):
        keys = list(bins[group, owner_class].items())
        key_sizes = [numel[region] * sizes[dtype] for (_, region, dtype), _ in keys]
        start = 0
        for end in partition(key_sizes, draft.settings.max_chunk_bytes):
            offsets, nbytes = layout(key_sizes[start:end])
            rows: list[tuple[int, int]] = []
            for ((source, region, dtype), members), offset in zip(keys[start:end], offsets, strict=True):
                rows += [(row, len(k_source)) for row in members]
                k_source.append(source)
                k_region.append(region)
                k_dtype.append(dtype)
                k_offset.append(offset)
            rows.sort()
            s_row += [row for row, _ in rows]
            s_key += [key for _, key in rows]
            c_group.append(group)
            c_class.append(owner_class)
            key_end.append(len(k_source))
            scatter_end.append(len(s_row))
            c_nbytes.append(nbytes)
            start = end
    return evolve(
        program,
        keys=Keys(tuple(k_source), tuple(k_region), tuple(k_dtype), tuple(k_offset)),
        scatters=Scatters(
            tuple(s_key),
            tuple(f.parameters[row] for row in s_row),
            tuple(f.dest_regions[row] for row in s_row),
        ),
        provenance=Provenance(
            loaders=trace.loaders,
            chains=trace.chains,
            scatter_loader=tuple(f.loaders[row] for row in s_row),
            scatter_chain=tuple(f.chains[row] for row in s_row),
            fill_loader=trace.fill_loaders,
            operation_loader=trace.operation_loaders,
        ),
        chunks=Chunks(
            tuple(c_group),
            tuple(c_class),
            (0,) * len(c_group),
            tuple(key_end),
            tuple(scatter_end),
            tuple(c_nbytes),
        ),
    )
