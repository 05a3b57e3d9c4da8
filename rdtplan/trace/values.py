"""Values: what a loader has computed so far, as a graph that the recorder can write down as an expression.

A value stands for the contiguous content of one storage. Its leaves are slices of sources, or regions of watched
parameters as they were at that moment; everything else is an entry of the closed table in `rdtplan/ir/operations.py`.
The constructors simplify as they build, so that what only moves data stays a slice: a region of a region, of a
concatenation or of a reshaped copy is read off the source itself, and a region of a cast or an exponential casts or
exponentiates only the elements that are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch

from rdtplan.ir.operations import BINARY, NUMBERS, UNARY, Expression, Node
from rdtplan.ir.regions import Region, canonical, compose, contiguous_stride, cover, digits, overlap
from rdtplan.trace.watch import dtype_name

Shape = tuple[int, ...]


class Value:
    """One node of the graph. `op` is an entry of the closed table, or one of:

    - `source`: the slice `region` of source `row`;
    - `parameter`: `region` of the watched parameter `row`, as it was when `since` writes had been recorded;
    - `unset`: memory that nobody wrote.
    """

    __slots__ = ("arguments", "dtype", "ints", "number", "op", "region", "row", "shape", "since")

    def __init__(
        self,
        op: str,
        arguments: tuple[Value, ...],
        dtype: torch.dtype,
        shape: Iterable[int],
        *,
        ints: tuple[int, ...] = (),
        number: float = 0.0,
        row: int = -1,
        region: Region | None = None,
        since: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        self.op = op
        self.arguments = arguments
        self.dtype = dtype
        self.shape: Shape = tuple(shape)
        self.ints = ints
        self.number = number
        self.row = row
        self.region = region
        self.since = since

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_leaf(self) -> bool:
        return self.op in ("source", "parameter")


def flat_region(numel: int) -> Region:
    """All of a contiguous tensor."""
    return canonical((numel,), (1,), 0)


def number(value: float) -> Value:
    """A Python number."""
    if isinstance(value, int):
        return Value("integer", (), torch.int64, (), ints=(value,))
    return Value("real", (), torch.float64, (), number=value)


def full(dtype: torch.dtype, shape: Iterable[int], value: float) -> Value:
    """A constant tensor."""
    return Value("full", (), dtype, shape, number=float(value))


def convert(value: Value, dtype: torch.dtype) -> Value:
    """The same elements in another type."""
    if value.dtype == dtype:
        return value
    return Value("convert", (value,), dtype, value.shape)


def apply(op: str, arguments: tuple[Value, ...], dtype: torch.dtype, shape: Iterable[int]) -> Value:
    """An elementwise operation."""
    return Value(op, arguments, dtype, shape)


def cat(arguments: Sequence[Value], dim: int, dtype: torch.dtype, shape: Iterable[int]) -> Value:
    """Arguments one after another; empty ones vanish."""
    kept = tuple(convert(a, dtype) for a in arguments if a.numel)
    return kept[0] if len(kept) == 1 else Value("cat", kept, dtype, shape, ints=(dim,))


def region(value: Value, shape: Iterable[int], where: Region, dtype: torch.dtype) -> Value:
    """The elements `where` of a value's flat memory, as a contiguous tensor of `shape`."""
    shape = tuple(shape)
    if dtype == value.dtype:
        if where == flat_region(value.numel) and shape == value.shape:
            return value
        found = _simpler(value, shape, where)
        if found is not None:
            return found
    return Value("region", (value,), dtype, shape, ints=(where.offset, *where.shape, *where.stride))


def _simpler(value: Value, shape: Shape, where: Region) -> Value | None:
    if value.is_leaf:
        assert value.region is not None
        inner = compose(value.region, where)
        if inner is not None:
            return Value(value.op, (), value.dtype, shape, row=value.row, region=inner, since=value.since)
    elif value.op == "full":
        return full(value.dtype, shape, value.number)
    elif value.op == "unset":
        return Value("unset", (), value.dtype, shape)
    elif value.op == "region" and value.arguments[0].dtype == value.dtype:
        inner = compose(_view(value), where)
        if inner is not None:
            return region(value.arguments[0], shape, inner, value.dtype)
    elif value.op == "cat":
        return _of_piece(value, shape, where)
    elif value.op == "put":
        if where == _view(value):
            return region(value.arguments[1], shape, flat_region(prod(shape)), value.dtype)
        if not overlap(where, _view(value)):
            return region(value.arguments[0], shape, where, value.dtype)
    elif (value.op in UNARY or value.op == "convert") and prod(shape) <= value.numel:
        argument = value.arguments[0]
        return Value(value.op, (region(argument, shape, where, argument.dtype),), value.dtype, shape)
    elif value.op in BINARY and prod(shape) <= value.numel and any(a.op in NUMBERS for a in value.arguments):
        parts = tuple(a if a.op in NUMBERS else region(a, shape, where, a.dtype) for a in value.arguments)
        return Value(value.op, parts, value.dtype, shape)
    return None


def _of_piece(value: Value, shape: Shape, where: Region) -> Value | None:
    """A region of a concatenation that lies in one piece of it."""
    found = digits(value.shape, where)
    if found is None:
        return None
    steps, ranges = found
    dim = value.ints[0]
    start = 0
    for piece in value.arguments:
        end = start + piece.shape[dim]
        if start <= ranges[dim][0] and ranges[dim][1] < end:
            strides = (*contiguous_stride(piece.shape), 0)
            first = [lo - (start if d == dim else 0) for d, (lo, _) in enumerate(ranges)]
            offset = sum(lo * s for lo, s in zip(first, strides, strict=False))
            inner = canonical((n for _, _, n in steps), (m * strides[d] for d, m, _ in steps), offset)
            return region(piece, shape, inner, value.dtype)
        start = end
    return None


def put(base: Value | None, value: Value, where: Region) -> Value | None:
    """`base` with `value` at `where` of its flat memory; None when what is around it is not known."""
    if base is None:
        return None
    value = convert(value, base.dtype)
    if where == flat_region(base.numel):
        return region(value, base.shape, flat_region(value.numel), base.dtype)
    if base.op == "put" and where == _view(base):
        base = base.arguments[0]
    return Value("put", (base, value), base.dtype, base.shape, ints=(where.offset, *where.shape, *where.stride))


def _view(value: Value) -> Region:
    rank = (len(value.ints) - 1) // 2
    return Region(value.ints[1 : 1 + rank], value.ints[1 + rank :], value.ints[0])


def leaves_of(root: Value) -> list[Value]:
    """Leaves of a value, first use first."""
    return [v for v in _ordered(root) if v.is_leaf]


def set_everywhere(root: Value) -> bool:
    """Is every element of a value known? Memory that nobody wrote may only stand where all of it is covered."""
    covered: list[Region] = []
    at = root
    while at.op == "put":
        if not set_everywhere(at.arguments[1]):
            return False
        covered.append(_view(at))
        at = at.arguments[0]
    if at.op == "unset":
        return at.numel == 0 or (bool(covered) and cover(flat_region(at.numel), covered).missing == 0)
    return all(set_everywhere(a) for a in at.arguments)


def _ordered(root: Value) -> list[Value]:
    """All nodes, arguments before uses."""
    found: dict[int, Value] = {}
    pending = [(root, False)]
    while pending:
        value, ready = pending.pop()
        if id(value) in found:
            continue
        if ready:
            found[id(value)] = value
        else:
            pending.append((value, True))
            pending += [(a, False) for a in reversed(value.arguments)]
    return list(found.values())


def expression(root: Value) -> Expression:
    """The value as data; leaf k is the k-th of `leaves_of`."""
    index: dict[int, int] = {}
    nodes: list[Node] = []
    leaves = 0
    for value in _ordered(root):
        op, ints = value.op, value.ints
        if value.is_leaf:
            op, ints, leaves = "leaf", (leaves,), leaves + 1
        elif op == "unset":
            op = "full"
        index[id(value)] = len(nodes)
        arguments = tuple(index[id(a)] for a in value.arguments)
        nodes.append(Node(op, arguments, dtype_name(value.dtype), value.shape, ints, value.number))
    return Expression(tuple(nodes))
