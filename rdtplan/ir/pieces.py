"""Sharded ownership: a source tensor that trainer ranks hold in pieces, each a box of it.

A piece is a source of its own: it has a name that says which part it is, its own shape and its own owners, and what a
rank publishes for it is the shard that it holds, as it is. Nothing is gathered. All arithmetic is in elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod

from attrs import frozen

from rdtplan.ir.manifest import Ints, Manifest, Piece, SourceTensor
from rdtplan.ir.regions import Region, canonical, contiguous_stride, digits, refine
from rdtplan.ir.topology import Ownership


def piece_name(name: str, shape: Ints, piece: Piece) -> str:
    """The source name of a piece; that of the tensor when the piece is all of it.

    >>> piece_name("w", (8, 4), Piece((2, 0), (2, 4), (1,)))
    'w[2:4]'
    >>> piece_name("w", (8, 4), Piece((0, 2), (8, 2), (1,)))
    'w[:,2:4]'
    """
    if piece.sizes == shape:
        return name
    cuts = [
        ":" if size == n else f"{offset}:{offset + size}"
        for offset, size, n in zip(piece.offsets, piece.sizes, shape, strict=True)
    ]
    while cuts[-1] == ":":
        cuts.pop()
    return f"{name}[{','.join(cuts)}]"


_PIECE = re.compile(r"\[[\d:,]+\]\Z", re.ASCII)


def whole_of(name: str, shape: Ints) -> tuple[str, int] | None:
    """The tensor that a source of `shape` is a piece of, and the first of its elements there.

    None when it is cut along an inner dimension: its elements are then no run of the tensor's.

    >>> whole_of("w[2:4]", (2, 4)), whole_of("w", (8, 4)), whole_of("w[:,2:4]", (8, 2))
    (('w', 8), ('w', 0), None)
    """
    found = _PIECE.search(name)
    if found is None:
        return name, 0
    first, _, end = found[0][1:-1].partition(":")
    if not first.isdecimal() or not end.isdecimal():
        return None
    return name[: found.start()], int(first) * prod(shape[1:])


def whole_entries(manifest: Manifest, ownership: Ownership) -> list[SourceTensor]:
    """The manifest that a plan's sources were made from: pieces put together again, with the ranks that hold them.

    Names that look like pieces and do not tile a tensor stay what they are.
    """
    bases: dict[str, list[int]] = {}
    for k, name in enumerate(manifest.names):
        found = _PIECE.search(name)
        bases.setdefault(name[: found.start()] if found else name, []).append(k)
    entries: list[SourceTensor] = []
    for base, members in bases.items():
        boxes = [_box_of(manifest.names[k][len(base) :], manifest.shape(k)) for k in members]
        pieces = tuple(Piece(b, manifest.shape(k), ownership.owners(k)) for b, k in zip(boxes, members, strict=True))
        first = manifest.shape(members[0])
        ends = [[o + n for o, n in zip(p.offsets, p.sizes, strict=True)] for p in pieces]
        shape = tuple(map(max, zip(*ends, strict=True))) if first else ()
        if (len(members) > 1 or manifest.names[members[0]] != base) and not untiled(shape, pieces):
            entries.append(SourceTensor(base, manifest.dtype(members[0]), shape, None, pieces))
            continue
        entries += [
            SourceTensor(manifest.names[k], manifest.dtype(k), manifest.shape(k), ownership.owners(k)) for k in members
        ]
    return entries


def _box_of(cuts: str, shape: Ints) -> Ints:
    """Where a piece begins, from the cuts in its name."""
    starts = [int(cut.partition(":")[0] or 0) for cut in cuts[1:-1].split(",")] if cuts else []
    return (*starts, *(0,) * (len(shape) - len(starts)))[: len(shape)]


def gathered_nbytes(manifest: Manifest, ownership: Ownership) -> Ints:
    """Bytes that each trainer rank receives from others before it can publish: of names owned whole by several ranks.

    They are taken to hold it in equal parts, as FSDP does. A piece is published as it is held, by however many.
    """
    found = [0] * ownership.ranks
    for name, cls, nbytes in zip(manifest.names, ownership.class_of, manifest.nbytes_column, strict=True):
        owners = ownership.classes[cls]
        if len(owners) > 1 and not _PIECE.search(name):
            for rank in owners:
                found[rank] += nbytes - nbytes // len(owners)
    return tuple(found)


def chunked(shape: Ints, dim: int, ranks: Sequence[int]) -> tuple[Piece, ...]:
    """`shape` cut along `dim` over `ranks` as torch.chunk (and so FSDP2) cuts: equal pieces, a short or no tail.

    >>> [p.sizes for p in chunked((5, 2), 0, (0, 1, 2))]
    [(2, 2), (2, 2), (1, 2)]
    """
    size = -(-shape[dim] // len(ranks))
    found = []
    for k, rank in enumerate(ranks):
        first, last = min(k * size, shape[dim]), min((k + 1) * size, shape[dim])
        if first < last:
            offsets = tuple(first if d == dim else 0 for d in range(len(shape)))
            sizes = tuple(last - first if d == dim else n for d, n in enumerate(shape))
            found.append(Piece(offsets, sizes, (rank,)))
    return tuple(found)


def untiled(shape: Ints, pieces: Sequence[Piece]) -> str:
    """Why `pieces` do not hold every element of a tensor exactly once; '' when they do."""
    for piece in pieces:
        if len(piece.offsets) != len(shape) or len(piece.sizes) != len(shape):
            return f"{_box(piece)} has not the {len(shape)} dimensions of {shape}"
        if not all(o >= 0 and s > 0 and o + s <= n for o, s, n in zip(piece.offsets, piece.sizes, shape, strict=True)):
            return f"{_box(piece)} is empty or leaves {shape}"
    for k, piece in enumerate(pieces):
        for other in pieces[:k]:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(piece.offsets, piece.sizes, other.offsets, other.sizes, strict=True)
            ):
                return f"{_box(other)} and {_box(piece)} overlap"
    held = sum(piece.numel for piece in pieces)  # boxes inside the tensor that do not overlap
    return "" if held == prod(shape) else f"they hold {held:,} of {prod(shape):,} elements"


def _box(piece: Piece) -> str:
    parts = (f"{o}:{o + s}" for o, s in zip(piece.offsets, piece.sizes, strict=False))
    return f"[{', '.join(parts)}] of ranks {list(piece.ranks)}"


def part(shape: Ints, source: Region, dest: Region, pieces: Sequence[Piece]) -> Iterator[tuple[int, Region, Region]]:
    """Cut a copy out of a tensor of `shape` at the borders of its pieces.

    Gives (index of the piece, the region within that piece's own contiguous tensor, the region of the destination),
    which together copy the same elements. ValueError when `source` is no region that follows the tensor's dimensions.

    >>> rows = chunked((4, 2), 0, (0, 1))
    >>> [(k, str(a), str(b)) for k, a, b in part((4, 2), Region((4,), (1,), 2), Region((4,), (1,), 0), rows)]
    [(0, '[shape (2,) stride (1,) offset 2]', '[shape (2,) stride (1,) offset 0]'), \
(1, '[shape (2,) stride (1,) offset 0]', '[shape (2,) stride (1,) offset 2]')]
    """
    if not source.numel:
        return
    found = digits(shape, source)
    if found is None:
        raise ValueError(f"{source} does not follow the dimensions of {shape}")
    steps, ranges = found
    below = contiguous_stride(shape)
    spelled = Region(
        tuple(n for _, _, n in steps),
        tuple(m * below[d] if m else 0 for d, m, _ in steps),
        source.offset,
    )
    sizes, strides, dest_strides = refine(spelled, dest)
    axes = [_Axis(n, *_step(s, below, shape), t) for n, s, t in zip(sizes, strides, dest_strides, strict=True)]
    first = tuple(lo for lo, _ in ranges)
    for k, piece in enumerate(pieces):
        inner = contiguous_stride(piece.sizes)
        for lo, counts, at in _inside(axes, first, dest.offset, piece):
            offset = sum((lo[d] - piece.offsets[d]) * inner[d] for d in range(len(shape)))
            yield (
                k,
                canonical(counts, (a.step * inner[a.dim] if a.step else 0 for a in axes), offset),
                canonical(counts, (a.dest for a in axes), at),
            )


@frozen(slots=True)
class _Axis:
    """One dimension of the copy: `count` steps of `step` indices in dimension `dim` of the tensor."""

    count: int
    dim: int
    step: int
    dest: int
    """Elements of the destination a step."""


def _step(stride: int, below: Ints, shape: Ints) -> tuple[int, int]:
    """(dimension, indices) that a stride of the full tensor steps."""
    if not stride:
        return 0, 0
    d = next(d for d, b in enumerate(below) if shape[d] > 1 and stride >= b and stride % b == 0)
    return d, stride // below[d]


def _inside(
    axes: Sequence[_Axis], first: Ints, at: int, piece: Piece, depth: int = 0
) -> Iterator[tuple[Ints, Ints, int]]:
    """Boxes of the copy within a piece: (first index in every dimension, counts of all axes, destination offset)."""
    if depth == len(axes):
        if all(o <= i < o + s for i, o, s in zip(first, piece.offsets, piece.sizes, strict=True)):
            yield first, (), at
        return
    axis = axes[depth]
    lo, hi = piece.offsets[axis.dim], piece.offsets[axis.dim] + piece.sizes[axis.dim]
    rest = sum((a.count - 1) * a.step for a in axes[depth + 1 :] if a.dim == axis.dim)
    start, step = first[axis.dim], axis.step
    if not step:  # the same elements again and again
        whole, partial = range(axis.count), range(0)
    else:
        reach = range(_up(lo - start - rest, step), min(axis.count, (hi - 1 - start) // step + 1))
        whole = range(_up(lo - start, step), min(axis.count, (hi - 1 - start - rest) // step + 1))
        reach, whole = _from_0(reach), _from_0(whole)
        partial = [j for j in reach if j not in whole]  # type: ignore[assignment]
    runs = [(whole.start, len(whole))] if len(whole) else []
    for j, count in sorted([*runs, *((j, 1) for j in partial)]):
        moved = tuple(i + j * step if d == axis.dim else i for d, i in enumerate(first))
        for lo_inner, counts, dest in _inside(axes, moved, at + j * axis.dest, piece, depth + 1):
            yield lo_inner, (count, *counts), dest


def _up(distance: int, step: int) -> int:
    return -(-distance // step)


def _from_0(r: range) -> range:
    return range(max(0, r.start), max(0, r.start, r.stop))
