"""Copies as plain descriptors, and their tiling for the CUDA kernel. No CUDA here: all of it is arithmetic on integers.

A `Move` says which bytes go where relative to *bases*: one address for each memory that takes part (a packed slot, a
source tensor, a parameter). Bases change from sync to sync, because a reload gives parameters new memory and a trainer
gathers into new memory; the moves do not. So the kernel's table is built once, and a sync brings a list of addresses.

The kernel moves *tiles* of `rows x columns` units. A unit is the widest of 16, 8, 4, 2 and 1 bytes at which everything
in a move is aligned; what a row has beyond whole units becomes a second, narrower move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from attrs import evolve, frozen

UNITS = (16, 8, 4, 2, 1)
"""Bytes that one element of a tile may have."""
MAX_DIMS = 3
"""Dimensions of a move beside the contiguous run; more go to torch."""
MAX_EXTENT = 1 << 30
"""A move has fewer rows than these, and fewer bytes in each: the kernel counts both in 32 bits. More go to torch."""
TILE_COLUMNS = (1024, 128, 16)
"""Widths of tiles, in elements."""
TILE_ELEMENTS = 8192
LINE_NBYTES = 8192
"""A contiguous run is folded into lines this long, so that it fills tiles of 8 rows."""
FIELDS = 15
"""Integers of a row of the kernel's table."""


@frozen(slots=True)
class Move:
    """One strided copy. `source` and `dest` are indices of bases, everything else but `shape` is in bytes."""

    source: int
    source_at: int
    dest: int
    dest_at: int
    shape: tuple[int, ...]
    """Outer dimensions; the innermost step is a run of `run` bytes."""
    source_stride: tuple[int, ...]
    dest_stride: tuple[int, ...]
    run: int


def make_move(
    bases: tuple[int, int],
    shape: Sequence[int],
    source_stride: Sequence[int],
    dest_stride: Sequence[int],
    source_offset: int,
    dest_offset: int,
    itemsize: int,
) -> Move | None:
    """A move from regions in elements, of one common shape; None when it is too large in some way, or has no elements.

    >>> make_move((0, 0), (4, 8), (16, 1), (8, 1), 3, 0, 2)
    Move(source=0, source_at=6, dest=0, dest_at=0, shape=(4,), source_stride=(32,), dest_stride=(16,), run=16)
    """
    dims = [d for d in zip(shape, source_stride, dest_stride, strict=True) if d[0] != 1]
    run = itemsize
    if dims and dims[-1][1] == dims[-1][2] == 1:
        run *= dims.pop()[0]
    outer = tuple(d[0] for d in dims)
    if len(dims) > MAX_DIMS or not prod(shape) or prod(outer) >= MAX_EXTENT or (outer and run >= MAX_EXTENT):
        return None
    source_at, dest_at = source_offset * itemsize, dest_offset * itemsize
    steps = tuple(d[1] * itemsize for d in dims), tuple(d[2] * itemsize for d in dims)
    return Move(bases[0], source_at, bases[1], dest_at, outer, *steps, run)


def _unit(move: Move, aligned: int) -> int:
    """The widest unit, no longer than the run, of which offsets, strides and bases (`aligned`) are multiples."""
    together = aligned | move.source_at | move.dest_at
    for n, a, b in zip(move.shape, move.source_stride, move.dest_stride, strict=True):
        together |= (a | b) if n > 1 else 0
    return next(u for u in UNITS if together % u == 0 and u <= move.run)


def in_units(move: Move, aligned: int) -> Iterator[tuple[int, Move]]:
    """(unit, part) of a move, such that every part's run is whole units and long runs are folded into lines."""
    if not move.shape and move.run > LINE_NBYTES:
        lines, unit = move.run // LINE_NBYTES, _unit(move, aligned)
        whole = lines * LINE_NBYTES
        yield (
            unit,
            evolve(move, shape=(lines,), source_stride=(LINE_NBYTES,), dest_stride=(LINE_NBYTES,), run=LINE_NBYTES),
        )
    else:
        unit = _unit(move, aligned)
        whole = move.run // unit * unit
        yield unit, evolve(move, run=whole)
    if whole < move.run:
        at, rest = whole, move.run - whole
        yield from in_units(evolve(move, source_at=move.source_at + at, dest_at=move.dest_at + at, run=rest), aligned)


@frozen
class Table:
    """What one launch of the kernel does: moves of one unit and one tile width."""

    unit: int
    columns: int
    rows: list[list[int]]
    """`FIELDS` integers a move: source base, source offset, dest base, dest offset, rows, columns, the two inner sizes
    by which a row number is taken apart, three source strides, three dest strides, column tiles. Offsets are in bytes,
    columns and strides in elements of `element` bytes."""
    tiles: list[int]
    """Tiles of each move."""

    @property
    def element(self) -> int:
        """Bytes that one lane of the kernel moves; two neighbours make a unit of 16."""
        return min(self.unit, 8)


def tabulate(moves: Iterable[Move], aligned: int) -> list[Table]:
    """The tables for `moves` when every base is a multiple of `aligned` bytes (a power of two)."""
    found: dict[tuple[int, int], Table] = {}
    for move in moves:
        for unit, part in in_units(move, aligned):
            across = part.run // min(unit, 8)
            columns = next((c for c in reversed(TILE_COLUMNS) if across <= c), TILE_COLUMNS[0])
            table = found.setdefault((unit, columns), Table(unit, columns, [], []))
            down, column_tiles = prod(part.shape), -(-across // columns)
            shape, *strides = (_padded(part.shape, 1), _padded(part.source_stride, 0), _padded(part.dest_stride, 0))
            steps = [s // table.element for of in strides for s in of]
            # the outermost size is left out: a row number is below `down`
            table.rows.append(
                [part.source, part.source_at, part.dest, part.dest_at, down, across, *shape[1:], *steps, column_tiles]
            )
            table.tiles.append(-(-down // (TILE_ELEMENTS // columns)) * column_tiles)
    return list(found.values())


def _padded(values: tuple[int, ...], value: int) -> tuple[int, ...]:
    return (value,) * (MAX_DIMS - len(values)) + values
