"""Regions: `as_strided` descriptors, and the little arithmetic the plan needs on them.

All numbers are elements, never bytes. A region lists its elements in *logical order* (last dimension fastest); that order is
what a copy preserves. Geometry itself is never computed here: torch computes it on meta tensors and we read it off. What
this module does is rewrite a descriptor into an equivalent one: the canonical form (so that two spellings of one slice are
one key), the common refinement of a source and a destination, cuts, and coverage proofs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from attrs import frozen


@frozen(slots=True)
class Region:
    """Elements `offset + sum(i_d * stride[d])` of a flat storage, `0 <= i_d < shape[d]`, last dimension fastest."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return f"[shape {self.shape} stride {self.stride} offset {self.offset}]"


def canonical(shape: Iterable[int], stride: Iterable[int], offset: int) -> Region:
    """The shortest descriptor that lists the same elements in the same order.

    Size-1 dimensions vanish and neighbours that step as one merge, so a narrow of a full matrix by rows and the same rows
    reached by chunk or reshape are equal:

    >>> canonical((4, 1, 8), (8, 8, 1), 16)
    Region(shape=(32,), stride=(1,), offset=16)
    """
    out_shape: list[int] = []
    out_stride: list[int] = []
    for n, s in zip(shape, stride, strict=True):
        if n == 1:
            continue
        if out_shape and out_stride[-1] == s * n:
            out_shape[-1] *= n
            out_stride[-1] = s
        else:
            out_shape.append(n)
            out_stride.append(s)
    return Region(tuple(out_shape), tuple(out_stride), offset)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements."""
    stride = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        stride[d] = stride[d + 1] * max(shape[d + 1], 1)
    return tuple(stride)


def span(region: Region) -> tuple[int, int]:
    """Half-open range of storage elements that a non-empty region touches (strides are >= 0 in torch)."""
    last = sum((n - 1) * s for n, s in zip(region.shape, region.stride, strict=True))
    return region.offset, region.offset + last + 1


def refine(a: Region, b: Region) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The coarsest common shape of two regions of equal numel, and the strides of both in it.

    Both regions descend from one logical shape by merging neighbours, so their cut points nest. ValueError otherwise.

    >>> refine(Region((6,), (1,), 0), Region((2, 3), (8, 1), 0))
    ((2, 3), (3, 1), (8, 1))
    """
    shape: list[int] = []
    stride_a: list[int] = []
    stride_b: list[int] = []
    ia, ib = len(a.shape) - 1, len(b.shape) - 1
    na = nb = 1
    sa = sb = 0
    while True:
        if na == 1 and ia >= 0:
            na, sa, ia = a.shape[ia], a.stride[ia], ia - 1
            continue
        if nb == 1 and ib >= 0:
            nb, sb, ib = b.shape[ib], b.stride[ib], ib - 1
            continue
        if na == 1 and nb == 1:
            break
        n = min(na, nb)
        if na % n or nb % n or n == 1:
            raise ValueError(f"{a} and {b} have no common shape")
        shape.append(n)
        stride_a.append(sa)
        stride_b.append(sb)
        na, sa = na // n, sa * n
        nb, sb = nb // n, sb * n
    return tuple(reversed(shape)), tuple(reversed(stride_a)), tuple(reversed(stride_b))


def split_pair(source: Region, dest: Region, limit: int) -> Iterator[tuple[Region, Region]]:
    """Cut a copy of `source` into `dest` (equal numel) by rows into pieces of at most `limit` elements, in order.

    The outermost dimension of the common shape is cut first; a row that is still too long is cut inside.
    """
    shape, stride_a, stride_b = refine(source, dest)
    yield from _split(shape, stride_a, stride_b, source.offset, dest.offset, max(1, limit))


def _split(
    shape: tuple[int, ...], sa: tuple[int, ...], sb: tuple[int, ...], oa: int, ob: int, limit: int
) -> Iterator[tuple[Region, Region]]:
    if prod(shape) <= limit:
        yield canonical(shape, sa, oa), canonical(shape, sb, ob)
        return
    inner = prod(shape[1:])
    if inner > limit:
        for i in range(shape[0]):
            yield from _split(shape[1:], sa[1:], sb[1:], oa + i * sa[0], ob + i * sb[0], limit)
        return
    pieces = -(-shape[0] // (limit // inner))
    for k in range(pieces):
        lo, hi = k * shape[0] // pieces, (k + 1) * shape[0] // pieces
        part = (hi - lo, *shape[1:])
        yield canonical(part, sa, oa + lo * sa[0]), canonical(part, sb, ob + lo * sb[0])


@frozen(slots=True)
class Coverage:
    """What a set of regions does to a storage of `numel` elements. Offsets are storage elements."""

    first_gap: tuple[int, int] | None
    """Half-open range of the first run of elements that no region holds."""
    first_overlap: tuple[int, int] | None
    """Half-open range that starts at the first element held twice."""
    out_of_bounds: tuple[int, int] | None
    """Span of the first region that leaves the storage."""
    missing: int
    """Elements that no region holds."""

    @property
    def exact(self) -> bool:
        return self.missing == 0 and self.first_overlap is None and self.out_of_bounds is None


def cover(extent: Region, regions: Iterable[Region]) -> Coverage:
    """Do `regions` hold every element of `extent` exactly once? Proved by a sweep over contiguous runs, not by counting.

    A row shard costs one interval, a column shard one interval a row. Offsets in the answer are storage elements.
    """
    items = [r for r in regions if r.numel]
    lo, hi = span(extent) if extent.numel else (0, 0)
    out = next((span(r) for r in items if span(r)[0] < lo or span(r)[1] > hi), None)
    intervals = sorted(run for r in items for run in runs(r))
    wanted = list(runs(extent)) if extent.numel else []
    first_gap: tuple[int, int] | None = None
    first_overlap: tuple[int, int] | None = None
    missing = 0
    reach = lo
    merged: list[tuple[int, int]] = []
    for a, b in intervals:
        if merged and a < reach:
            first_overlap = first_overlap or (a, min(b, reach))
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], b))
        else:
            merged.append((a, b))
        reach = max(reach, b)
    k = 0
    for a, b in wanted:
        at = a
        while k < len(merged) and merged[k][1] <= at:
            k += 1
        j = k
        while at < b:
            if j < len(merged) and merged[j][0] <= at:
                at = max(at, min(b, merged[j][1]))
                j += 1
                continue
            end = min(b, merged[j][0]) if j < len(merged) else b
            missing += end - at
            first_gap = first_gap or (at, end)
            at = end
    return Coverage(first_gap, first_overlap, out, missing)


def runs(region: Region) -> Iterator[tuple[int, int]]:
    """The contiguous runs of a region as half-open storage ranges, in logical order. A stride-0 dimension repeats runs."""
    shape, stride = region.shape, region.stride
    if shape and stride[-1] == 1:
        length, outer = shape[-1], len(shape) - 1
    else:
        length, outer = 1, len(shape)
    starts = [region.offset]
    for d in range(outer):
        step = stride[d]
        starts = [s + i * step for s in starts for i in range(shape[d])]
    for s in starts:
        yield s, s + length
