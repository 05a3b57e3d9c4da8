"""Put the pieces that trainer ranks hold in the place of the tensors that they make up.

A matrix of 8 rows held by two ranks as rows 0 to 3 and 4 to 7 becomes the sources `w[0:4]` and `w[4:8]`, each with one
owner, and a fetch of rows 2 to 5 becomes two: rows 2 to 3 of the first and rows 0 to 1 of the second. From here on a
piece is a source like any other, so chunks, routing and proofs know nothing of shards, and a rank serves what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from rdtplan.errors import PlanError
from rdtplan.ir.dtypes import itemsize
from rdtplan.ir.manifest import Ints, Manifest, Piece, SourceTensor, build_manifest
from rdtplan.ir.pieces import part, piece_name
from rdtplan.ir.regions import Region
from rdtplan.ir.traces import Fetches, RankTrace
from rdtplan.passes.draft import Draft


def part_sources(draft: Draft) -> Draft:
    """Manifest, owners and fetches by pieces, where there are any.

    PlanError RDT305 when a loader reads a tensor in a way that cannot be cut at the borders of its pieces.
    """
    if not any(draft.pieces):
        return draft
    entries: list[SourceTensor] = []
    owners: list[Ints] = []
    first: list[int] = []
    for k, name in enumerate(draft.manifest.names):
        shape, pieces = draft.manifest.shape(k), draft.pieces[k]
        first.append(len(entries))
        for piece in pieces or (Piece((0,) * len(shape), shape, draft.owners[k]),):
            entries.append(SourceTensor(piece_name(name, shape, piece), draft.manifest.dtype(k), piece.sizes))
            owners.append(tuple(sorted(set(piece.ranks))))
    traces = [_part_trace(p.trace, draft.manifest, draft.pieces, first) for p in draft.programs]
    return evolve(
        draft,
        manifest=build_manifest(entries),
        owners=tuple(owners),
        programs=tuple(evolve(p, trace=t) for p, t in zip(draft.programs, traces, strict=True)),
    )


def _part_trace(
    trace: RankTrace, manifest: Manifest, pieces: Sequence[tuple[Piece, ...]], first: Sequence[int]
) -> RankTrace:
    f = trace.fetches
    ids: dict[Region, int] = {r: i for i, r in enumerate(trace.regions)}
    seen: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    for source, dtype, src, param, dest, loader, chain in zip(
        f.sources, f.dtypes, f.source_regions, f.parameters, f.dest_regions, f.loaders, f.chains, strict=True
    ):
        if not pieces[source]:
            rows.append((first[source], dtype, src, param, dest, loader, chain))
            continue
        key = (manifest.shapes[source], manifest.dtypes[source], pieces[source], src, dest, dtype)
        found = seen.get(key)
        if found is None:
            where = f"{manifest.names[source]!r}, read by {trace.loaders[loader]}"
            scale = (itemsize(manifest.dtype(source)), itemsize(trace.dtype_table[dtype]))
            shape, boxes = _retyped(manifest.shape(source), pieces[source], *scale, where)
            found = seen[key] = []
            try:
                for k, a, b in part(shape, trace.regions[src], trace.regions[dest], boxes):
                    found.append((k, ids.setdefault(a, len(ids)), ids.setdefault(b, len(ids))))
            except ValueError as error:
                raise _uncut(f"{where}: {error}") from None
        rows += [(first[source] + k, dtype, a, param, b, loader, chain) for k, a, b in found]
    return evolve(trace, regions=tuple(ids), fetches=Fetches(*zip(*rows, strict=True)))


def _retyped(
    shape: Ints, pieces: tuple[Piece, ...], size: int, read_size: int, where: str
) -> tuple[Ints, tuple[Piece, ...]]:
    """Tensor and boxes in elements of the type that the loader reads, which its last dimension is counted in."""
    if size == read_size:
        return shape, pieces

    def scaled(sizes: Ints) -> Ints:
        if not sizes or sizes[-1] * size % read_size:
            raise _uncut(f"{where}: a border of {sizes} cuts an element of {read_size} bytes")
        return (*sizes[:-1], sizes[-1] * size // read_size)

    return scaled(shape), tuple(Piece(scaled(p.offsets), scaled(p.sizes), p.ranks) for p in pieces)


def _uncut(what: str) -> PlanError:
    return PlanError(
        f"a slice cannot be cut at the borders of the shards: {what}",
        fix="give this name to owners as a whole (it is then gathered)",
        code="RDT305",
    )
