"""Regions: `as_strided` descriptors, and the little arithmetic the plan needs on them.

All numbers are elements, never bytes. A region lists its elements in *logical order* (last dimension
fastest); that order is what a copy preserves. Geometry itself is never computed here: torch computes it on
meta tensors and we read it off. What this module does is rewrite a descriptor into an equivalent one: the
canonical form (so that two spellings of one slice are one key), the common refinement of a source and a
destination, cuts, and coverage proofs.
"""

from bisect import bisect
from collections.abc import Iterable, Iterator
from math import inf, prod

from attrs import frozen


@frozen(slots=True)
class Region:
    """Elements `offset + sum(i_d * stride[d])` of a flat storage, `0 <= i_d < shape[d]`."""

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

    Size-1 dimensions vanish and neighbours that step as one merge, so a narrow of a full matrix by rows and
    the same rows reached by chunk or reshape are equal:

    >>> canonical((4, 1, 8), (8, 8, 1), 16)
    Region(shape=(32,), stride=(1,), offset=16)

    Every empty region is `Region((0,), (1,), 0)`.
    """
    out_shape: list[int] = []
    out_stride: list[int] = []
    for n, s in zip(shape, stride, strict=True):
        if n == 0:
            return Region((0,), (1,), 0)
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

    Both regions descend from one logical shape by merging neighbours, so their cut points nest. ValueError
    when they do not.

    >>> refine(Region((6,), (1,), 0), Region((2, 3), (8, 1), 0))
    ((2, 3), (3, 1), (8, 1))
    """
    if not a.numel and not b.numel:
        return (0,), (1,), (1,)
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
        if n <= 1 or na % n or nb % n:
            raise ValueError(f"{a} and {b} have no common shape")
        shape.append(n)
        stride_a.append(sa)
        stride_b.append(sb)
        na, sa = na // n, sa * n
        nb, sb = nb // n, sb * n
    return tuple(reversed(shape)), tuple(reversed(stride_a)), tuple(reversed(stride_b))


def digits(sizes: tuple[int, ...], region: Region) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]] | None:
    """A region of a contiguous tensor of shape `sizes`, dimension by dimension; None when it runs across them.

    Returns (per step of the region, outermost first: the dimension it steps in, by how much, how often; per
    dimension: first and last index that occurs).

    >>> digits((4, 6), Region((4, 2), (6, 1), 2))
    ([(0, 1, 4), (1, 1, 2)], [(0, 3), (2, 3)])
    """
    below = contiguous_stride(sizes)
    first = [region.offset // b % n if n else 0 for n, b in zip(sizes, below, strict=True)]
    last = list(first)
    steps: list[tuple[int, int, int]] = []
    pending = [(n, s) for n, s in zip(region.shape, region.stride, strict=True)]
    while pending:
        n, s = pending.pop()
        if s == 0:
            steps.append((-1, 0, n))
            continue
        d = next((d for d, b in enumerate(below) if sizes[d] > 1 and s >= b and s % b == 0), None)
        if d is None:
            return None
        m = s // below[d]
        if m >= sizes[d]:
            return None
        if last[d] + m * (n - 1) >= sizes[d]:  # it runs on into the next dimension
            inner = sizes[d] // m
            if sizes[d] % m or n % inner or n == inner:
                return None
            pending += [(n // inner, s * inner), (inner, s)]
            continue
        last[d] += m * (n - 1)
        steps.append((d, m, n))
    return steps[::-1], list(zip(first, last, strict=True))


def compose(outer: Region, inner: Region) -> Region | None:
    """The elements of `outer` that `inner` picks out of its logical order; None when that is no one region.

    >>> str(compose(Region((4, 6), (8, 1), 0), Region((4, 2), (6, 1), 2)))
    '[shape (4, 2) stride (8, 1) offset 2]'
    """
    if not inner.numel:
        return inner
    found = digits(outer.shape, inner)
    if found is None:
        return None
    steps, ranges = found
    strides = (*outer.stride, 0)
    offset = outer.offset + sum(lo * s for (lo, _), s in zip(ranges, outer.stride, strict=True))
    return canonical((n for _, _, n in steps), (m * strides[d] for d, m, _ in steps), offset)


def overlap(a: Region, b: Region) -> bool:
    """Do two regions share an element?"""
    if not a.numel or not b.numel:
        return False
    (lo_a, hi_a), (lo_b, hi_b) = span(a), span(b)
    if hi_a <= lo_b or hi_b <= lo_a:
        return False
    held, _ = _merge(runs(unordered(a)))
    others, _ = _merge(runs(unordered(b)))
    k = 0
    for lo, hi in others:
        while k < len(held) and held[k][1] <= lo:
            k += 1
        if k < len(held) and held[k][0] < hi:
            return True
    return False


def split_pair(source: Region, dest: Region, limit: int, rows: tuple[int, ...] = ()) -> Iterator[tuple[Region, Region]]:
    """Cut a copy of `source` into `dest` (equal numel) into pieces of at most `limit` elements, in order.

    The outermost dimension of the common shape is cut first; what is still too long is cut inside. `rows` are
    lengths, descending, at which a dimension that runs on over several rows of the source may be cut: the
    strides of the full tensor. A limit below 1 counts as 1.

    >>> [str(a) for a, _ in split_pair(Region((12,), (1,), 0), Region((12,), (1,), 0), 8, rows=(4,))]
    ['[shape (4,) stride (1,) offset 0]', '[shape (8,) stride (1,) offset 4]']
    """
    shape, stride_a, stride_b = _part_rows(*refine(source, dest), rows)
    yield from _split(shape, stride_a, stride_b, source.offset, dest.offset, max(1, limit))


def _part_rows(
    shape: tuple[int, ...], sa: tuple[int, ...], sb: tuple[int, ...], rows: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The same copy with every dimension that holds several whole rows taken apart into rows and row."""
    out: list[tuple[int, int, int]] = []
    for n, a, b in zip(shape, sa, sb, strict=True):
        for row in rows:
            steps = row // a if a and row % a == 0 else 0
            if 1 < steps < n and n % steps == 0:
                out.append((n // steps, a * steps, b * steps))
                n = steps
        out.append((n, a, b))
    return tuple(n for n, _, _ in out), tuple(a for _, a, _ in out), tuple(b for _, _, b in out)


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
    """What a set of regions does to an extent. Offsets are storage elements."""

    first_gap: tuple[int, int] | None
    """Half-open range of the first run of elements that no region holds."""
    first_overlap: tuple[int, int] | None
    """Half-open range that starts at the first element held twice."""
    out_of_bounds: tuple[int, int] | None
    """Span of the first region that holds an element outside the extent."""
    missing: int
    """Elements of the extent that no region holds."""

    @property
    def exact(self) -> bool:
        return self.missing == 0 and self.first_overlap is None and self.out_of_bounds is None


def cover(extent: Region, regions: Iterable[Region]) -> Coverage:
    """Do `regions` hold every element of `extent` exactly once? Offsets in the answer are storage elements.

    Proved by a sweep over contiguous runs: a row shard costs one interval, a column shard one interval a row. See
    `run_count` for what that takes.
    """
    items = [unordered(r) for r in regions if r.numel]
    extent = unordered(extent)
    wanted, _ = _merge(runs(extent)) if extent.numel else ([], None)
    lo, hi = (wanted[0][0], wanted[-1][1]) if wanted else (0, 0)
    held, first_overlap = _merge(run for r in items for run in runs(r))

    def leaves(region: Region) -> bool:
        first, end = span(region)
        return first < lo or end > hi or (len(wanted) > 1 and not all(_inside(x, wanted) for x in runs(region)))

    first_gap: tuple[int, int] | None = None
    missing = k = 0
    for at, b in wanted:
        while at < b:
            while k < len(held) and held[k][1] <= at:
                k += 1
            if k < len(held) and held[k][0] <= at:
                at = held[k][1]
                continue
            end = min(b, held[k][0]) if k < len(held) else b
            missing += end - at
            first_gap = first_gap or (at, end)
            at = end
    return Coverage(first_gap, first_overlap, next((span(r) for r in items if leaves(r)), None), missing)


def unordered(region: Region) -> Region:
    """The same elements in the order of the storage, which is that of the fewest runs.

    >>> unordered(Region((3, 4), (1, 3), 0))
    Region(shape=(12,), stride=(1,), offset=0)
    """
    dims = sorted(zip(region.stride, region.shape, strict=True), reverse=True)
    return canonical((n for _, n in dims), (s for s, _ in dims), region.offset)


def run_count(region: Region) -> int:
    """Contiguous runs that a proof about `region` looks at one by one."""
    if not region.numel:
        return 0
    flat = unordered(region)
    return prod(flat.shape[:-1]) if flat.shape and flat.stride[-1] == 1 else flat.numel


def _merge(ranges: Iterable[tuple[int, int]]) -> tuple[list[tuple[int, int]], tuple[int, int] | None]:
    """The union of half-open ranges, ascending and apart; and where the first two of them overlap."""
    merged: list[tuple[int, int]] = []
    first_overlap: tuple[int, int] | None = None
    for a, b in sorted(ranges):
        if not merged or a > merged[-1][1]:
            merged.append((a, b))
            continue
        reach = merged[-1][1]
        if a < reach and first_overlap is None:
            first_overlap = (a, min(b, reach))
        merged[-1] = (merged[-1][0], max(b, reach))
    return merged, first_overlap


def _inside(run: tuple[int, int], merged: list[tuple[int, int]]) -> bool:
    k = bisect(merged, (run[0], inf)) - 1
    return k >= 0 and run[1] <= merged[k][1]


def runs(region: Region) -> Iterator[tuple[int, int]]:
    """Contiguous runs of a region, half-open storage ranges in logical order. A stride of 0 repeats runs."""
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
