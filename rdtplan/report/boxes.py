"""Regions in the words of the tensor they lie in: `[192:384, :]` instead of a shape, strides and an offset."""

from __future__ import annotations

from math import prod

from attrs import frozen

from rdtplan.ir.manifest import Ints
from rdtplan.ir.regions import Region, canonical


@frozen(slots=True)
class Box:
    """A region that is a plain slice in every dimension."""

    starts: Ints
    lengths: Ints
    order: Ints
    """Dimensions of the tensor in the order in which the region lists them; ascending unless it is transposed."""

    def text(self, shape: Ints) -> str:
        """As an index expression of a tensor of `shape`."""
        if not shape:
            return "[]"
        parts = [index_text(a, n, full) for a, n, full in zip(self.starts, self.lengths, shape, strict=True)]
        turned = "" if list(self.order) == sorted(self.order) else f" transposed {list(self.order)}"
        return f"[{', '.join(parts)}]{turned}"


def index_text(start: int, length: int, full: int) -> str:
    """One dimension of an index expression.

    >>> index_text(0, 4, 4), index_text(7, 1, 128), index_text(192, 192, 1536)
    (':', '7', '192:384')
    """
    if start == 0 and length == full:
        return ":"
    return str(start) if length == 1 else f"{start}:{start + length}"


def box_of(region: Region, shape: Ints, stride: Ints) -> Box | None:
    """The slice of a dense tensor that a canonical region is, None when it is none.

    >>> box_of(Region((8,), (1,), 8), (4, 4), (4, 1))
    Box(starts=(2, 0), lengths=(2, 4), order=(0, 1))
    """
    if not prod(shape) or not region.numel:
        return None
    dims = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -stride[d])
    starts = [0] * len(shape)
    rest = region.offset
    for d in dims:
        starts[d], rest = divmod(rest, stride[d]) if stride[d] else (0, rest)
    lengths, order = [1] * len(shape), []
    for n, step in zip(reversed(region.shape), reversed(region.stride), strict=True):
        for d in reversed(dims):
            if n > 1 and stride[d] == step and lengths[d] == 1:
                take = n if n <= shape[d] - starts[d] else shape[d]
                if n % take:
                    return None
                lengths[d], n, step = take, n // take, step * shape[d]
                order.insert(0, d)
    box = Box(tuple(starts), tuple(lengths), tuple(order))
    inside = all(a + n <= full for a, n, full in zip(starts, lengths, shape, strict=True))
    if rest or not inside:
        return None
    again = canonical([lengths[d] for d in order], [stride[d] for d in order], region.offset)
    return box if again == region else None


def region_text(region: Region, shape: Ints, stride: Ints) -> str:
    """A region as an index expression, or in full where it is no slice."""
    if not shape and region.numel == 1:
        return "[]"
    box = box_of(region, shape, stride)
    return box.text(shape) if box else str(region)
