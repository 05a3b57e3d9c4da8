"""Cut slices that are larger than a chunk may be.

With a limit of 8 MiB, a 20 MiB vocabulary matrix (one FetchKey) becomes three FetchKeys of whole rows, each
with its part of the destination. A row that is itself above the limit is cut inside; a single element is
never cut, so a limit below one element gives pieces of one element. A plan without a limit is left alone.
"""

from __future__ import annotations

from attrs import evolve

from rdtplan.ir.dtypes import itemsize
from rdtplan.ir.manifest import Ints, Manifest
from rdtplan.ir.regions import Region, contiguous_stride, split_pair
from rdtplan.ir.traces import Fetches, RankTrace
from rdtplan.passes.draft import Draft


def cut_slices(draft: Draft) -> Draft:
    """Replace every fetch above `settings.max_chunk_bytes` by row pieces below it."""
    limit = draft.settings.max_chunk_bytes
    if not limit:
        return draft
    return evolve(
        draft,
        programs=tuple(evolve(p, trace=_cut_trace(p.trace, limit, draft.manifest)) for p in draft.programs),
    )


def _cut_trace(trace: RankTrace, limit: int, manifest: Manifest) -> RankTrace:
    f = trace.fetches
    sizes = [itemsize(d) for d in trace.dtype_table]
    if all(trace.regions[r].numel * sizes[d] <= limit for r, d in zip(f.source_regions, f.dtypes, strict=True)):
        return trace
    ids: dict[Region, int] = {r: i for i, r in enumerate(trace.regions)}
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    for source, dtype, src, param, dest, loader, chain in zip(
        f.sources, f.dtypes, f.source_regions, f.parameters, f.dest_regions, f.loaders, f.chains, strict=True
    ):
        region = trace.regions[src]
        if region.numel * sizes[dtype] <= limit:
            rows.append((source, dtype, src, param, dest, loader, chain))
            continue
        lengths = _row_lengths(manifest, source, sizes[dtype])
        for a, b in split_pair(region, trace.regions[dest], limit // sizes[dtype], lengths):
            a_id, b_id = ids.setdefault(a, len(ids)), ids.setdefault(b, len(ids))
            rows.append((source, dtype, a_id, param, b_id, loader, chain))
    return evolve(trace, regions=tuple(ids), fetches=Fetches(*zip(*rows, strict=True)))


def _row_lengths(manifest: Manifest, source: int, size: int) -> Ints:
    """Row lengths of a source tensor at every depth, in elements of `size` bytes (a slice may be retyped)."""
    strides = contiguous_stride(manifest.shape(source))[:-1]
    return tuple(s * itemsize(manifest.dtype(source)) // size for s in strides)
