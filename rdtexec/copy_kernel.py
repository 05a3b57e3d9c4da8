"""The kernel that carries out a table of moves (`rdtexec.moves`), in one launch. Imported where there is a GPU alone.

A program takes tile after tile. It finds the tile's move, takes row numbers apart into the move's outer dimensions, and
copies up to `ROWS` runs of up to `COLUMNS` elements. Source and dest may be any memory the GPU can address: its own,
another GPU's mapped over NVLink, or page-locked host memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tiles"])
def copy_tiles(  # type: ignore[no-untyped-def]  # triton reads the annotations
    table,
    move_of_tile,
    first_tile,
    bases,
    tiles,
    ELEMENT: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        move = tl.load(move_of_tile + tile)
        row = table + move.to(tl.int64) * FIELDS
        source_at = tl.load(bases + tl.load(row)) + tl.load(row + 1)
        dest_at = tl.load(bases + tl.load(row + 2)) + tl.load(row + 3)
        down = tl.load(row + 4).to(tl.int32)
        across = tl.load(row + 5).to(tl.int32)
        size_1 = tl.load(row + 6).to(tl.int32)
        size_2 = tl.load(row + 7).to(tl.int32)
        source_0 = tl.load(row + 8)
        source_1 = tl.load(row + 9)
        source_2 = tl.load(row + 10)
        dest_0 = tl.load(row + 11)
        dest_1 = tl.load(row + 12)
        dest_2 = tl.load(row + 13)
        column_tiles = tl.load(row + 14).to(tl.int32)
        if ELEMENT == 8:
            source = source_at.to(tl.pointer_type(tl.int64))
            dest = dest_at.to(tl.pointer_type(tl.int64))
        elif ELEMENT == 4:
            source = source_at.to(tl.pointer_type(tl.int32))
            dest = dest_at.to(tl.pointer_type(tl.int32))
        elif ELEMENT == 2:
            source = source_at.to(tl.pointer_type(tl.int16))
            dest = dest_at.to(tl.pointer_type(tl.int16))
        else:
            source = source_at.to(tl.pointer_type(tl.int8))
            dest = dest_at.to(tl.pointer_type(tl.int8))
        if PAIRS:  # two elements of 8 bytes move as one of 16: everything is aligned to that
            source = tl.multiple_of(source, 16)
            dest = tl.multiple_of(dest, 16)
            across = tl.multiple_of(across, 2)
            source_0 = tl.multiple_of(source_0, 2)
            source_1 = tl.multiple_of(source_1, 2)
            source_2 = tl.multiple_of(source_2, 2)
            dest_0 = tl.multiple_of(dest_0, 2)
            dest_1 = tl.multiple_of(dest_1, 2)
            dest_2 = tl.multiple_of(dest_2, 2)
        at = tile - tl.load(first_tile + move)
        r = (at // column_tiles) * ROWS + tl.arange(0, ROWS)[:, None]
        c = (at % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = (r < down) & (c < across)
        i_2 = r % size_2
        i_1 = (r // size_2) % size_1
        i_0 = r // (size_2 * size_1)
        value = tl.load(source + (i_0 * source_0 + i_1 * source_1 + i_2 * source_2) + c, mask=inside)
        tl.store(dest + (i_0 * dest_0 + i_1 * dest_1 + i_2 * dest_2) + c, value, mask=inside)
