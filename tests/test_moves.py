"""Moves and their tables: carried out tile by tile as the kernel does, they copy the bytes that torch copies."""

from __future__ import annotations

import doctest
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rdtexec import moves
from rdtexec.copies import ScatterMoves
from rdtexec.destination import Destination
from rdtexec.moves import MAX_DIMS, MAX_EXTENT, TILE_ELEMENTS, Move, Table, make_move, tabulate
from rdtexec.plans import chunk_scatters
from rdtexec.transport import packed
from rdtexec.transport.local import group_layout
from rdtexec.transport.packed import dense_moves, pack_moves
from rdtplan.ir.regions import Region, contiguous_stride
from rdtplan.ir.topology import InferenceTopology, TransferSettings
from tests.fleet import destination_model
from tests.plans import Scenario, Sizes, make_plan

SPARE = 64
"""Bytes around everything, which must stay as they are."""


def carry_out(tables: list[Table], memory: dict[int, torch.Tensor]) -> None:
    """What the kernel does with the tables; `memory` are the bases, flat uint8."""
    for table in tables:
        rows = TILE_ELEMENTS // table.columns
        for row, tiles in zip(table.rows, table.tiles, strict=True):
            source, source_at, dest, dest_at, down, across, size_1, size_2, *steps, column_tiles = row
            for tile in range(tiles):
                first_row, first = tile // column_tiles * rows, tile % column_tiles * table.columns
                for r in range(first_row, min(first_row + rows, down)):
                    i = (r // (size_2 * size_1), r // size_2 % size_1, r % size_2)
                    count = min(table.columns, across - first) * table.element
                    a = source_at + (sum(x * s for x, s in zip(i, steps[:3], strict=True)) + first) * table.element
                    b = dest_at + (sum(x * s for x, s in zip(i, steps[3:], strict=True)) + first) * table.element
                    memory[dest][b : b + count] = memory[source][a : a + count]


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((128, 8192, 5120), (8192 * 5120, 1, 8192)),  # fused experts, transposed
        ((3, 1 << 30), (1 << 33, 3)),
        ((5, (1 << 30) + 3), (1 << 31, 1)),
        ((2, 3, 2, 3, 2, 3), (1000, 300, 90, 27, 8, 2)),
    ],
)
def test_what_the_kernel_cannot_count_is_copied_in_parts(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Too many rows, too long rows, too many dimensions: parts that the kernel can do, each from its own place."""
    region = Region(shape, stride, 7)
    assert make_move((0, 1), shape, stride, contiguous_stride(shape), 7, 0, 2) is None
    at = 64
    for move in dense_moves((0, 1), region, at, 2):
        assert len(move.shape) <= MAX_DIMS and prod(move.shape) < MAX_EXTENT and move.dest_at == at
        rest, source = (at - 64) // 2, 7
        for n, step in zip(contiguous_stride(shape), stride, strict=True):
            source, rest = source + rest // n * step, rest % n
        assert move.source_at == 2 * source
        for table in tabulate([move], 16):
            assert all(down < MAX_EXTENT and across < 1 << 31 for *_, down, across in (row[:6] for row in table.rows))
        at += prod(move.shape) * move.run
    assert at == 64 + 2 * prod(shape)


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(moves).failed == 0 and doctest.testmod(packed).failed == 0


def noise(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(st.data())
def test_a_table_copies_what_torch_copies(data: st.DataObject) -> None:
    """Any number of dimensions, strides of both sides, element sizes, offsets; bytes around the copy stay."""
    itemsize = data.draw(st.sampled_from((1, 2, 4, 8)))
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=MAX_DIMS)))
    shape += (data.draw(st.sampled_from((1, 3, 16, 100, 129, 1500))),)
    strides: list[tuple[int, ...]] = []
    sizes: list[int] = []
    for _ in range(2):
        stride, step = [], data.draw(st.sampled_from((1, 1, 1, 2)))
        for n in reversed(shape):
            stride.insert(0, step)
            step = step * n + data.draw(st.sampled_from((0, 0, 1, 8)))
        strides.append(tuple(stride))
        sizes.append(1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)))
    offsets = [data.draw(st.integers(0, 9)) for _ in range(2)]
    aligned = data.draw(st.sampled_from((1, 2, 16)))
    move = make_move((0, 1), shape, *strides, *offsets, itemsize)
    if move is None:
        assert len(shape) > MAX_DIMS
        return
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    whole = [(n + at) * itemsize + SPARE // 8 * 8 for n, at in zip(sizes, offsets, strict=True)]
    source, dest, expected = noise(whole[0], 1), noise(whole[1], 2), noise(whole[1], 2)
    expected.view(dtype).as_strided(shape, strides[1], offsets[1]).copy_(
        source.view(dtype).as_strided(shape, strides[0], offsets[0])
    )
    tables = tabulate([move], aligned)
    carry_out(tables, {0: source, 1: dest})
    assert torch.equal(dest, expected)
    assert all(x % table.unit == 0 or table.unit > aligned for table in tables for row in table.rows for x in (row[1],))


@pytest.mark.parametrize("nbytes", [1, 15, 16, 8191, 8192, 8193, 70_001, 1 << 20])
def test_long_runs_fill_tiles(nbytes: int) -> None:
    """A contiguous run is folded into lines; only what is left beyond whole lines and units takes tiles of its own."""
    move = make_move((0, 1), (nbytes,), (1,), (1,), 0, 0, 1)
    assert move is not None
    tables = tabulate([move], 16)
    source, dest = noise(nbytes, 3), torch.zeros(nbytes, dtype=torch.uint8)
    carry_out(tables, {0: source, 1: dest})
    assert torch.equal(dest, source)
    assert sum(sum(t.tiles) for t in tables) <= nbytes // (TILE_ELEMENTS * 8) + 6


@pytest.mark.parametrize(("at", "unit"), [(0, 16), (8, 8), (4, 4), (2, 2), (1, 1)])
def test_the_widest_unit_that_is_aligned_is_used(at: int, unit: int) -> None:
    """An offset, a stride or a base that is less aligned narrows the unit."""
    by_offset = Move(0, at, 1, 0, (3,), (64,), (64,), 32)
    by_stride = Move(0, 0, 1, 0, (3,), (64 + at,), (64,), 32)
    for move in (by_offset, by_stride):
        assert [t.unit for t in tabulate([move], 16)] == [unit]
    assert [t.unit for t in tabulate([Move(0, 0, 1, 0, (3,), (64,), (64,), 32)], unit)] == [unit]


SCENARIOS = (
    Scenario(Sizes(layers=2, dense_layers=1), InferenceTopology(tensor_parallel=2), trainer_ranks=2),
    Scenario(
        Sizes(layers=2, dense_layers=1),
        InferenceTopology(tensor_parallel=2, expert_parallel=True),
        TransferSettings(max_chunk_bytes=256),
        trainer_ranks=2,
        ownership="pipeline+experts",
    ),
)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_moves_of_plans_are_their_scatters(scenario: Scenario) -> None:
    """For every chunk: straight from the sources, or packed and then out of the slot, the views' bytes."""
    plan = make_plan(scenario)
    manifest = plan.manifest
    for worker in plan.consumers:
        program, routing = worker.program, worker.routing
        destination = Destination(destination_model(program.parameters), program)
        for chunk in range(len(program.chunks)):
            group = plan.groups[program.chunks.group[chunk]]
            offsets, nbytes = group_layout(manifest, plan.ownership, group, routing.producer[chunk])
            slot = noise(nbytes + 1, chunk)[:nbytes]
            full = {
                k: slot[at : at + manifest.nbytes(k)].view(getattr(torch, manifest.dtype(k)))
                for k, at in offsets.items()
            }
            packed = torch.zeros(program.chunks.nbytes[chunk], dtype=torch.uint8)
            keys = range(program.chunks.key_end[chunk - 1] if chunk else 0, program.chunks.key_end[chunk])
            for key in keys:
                moves = pack_moves(program, key, (program.keys.source[key], -1))
                carry_out(tabulate(moves, 16), {k: t.view(torch.uint8) for k, t in full.items()} | {-1: packed})
            expected = _after(destination, *destination.pairs_from_sources(chunk, full))
            assert _after(destination, *destination.pairs_from_packed(chunk, packed)) == expected
            for source, moves in ((slot, destination.moves(chunk, offsets)), (packed, destination.moves(chunk, None))):
                assert len(moves.moves) + len(moves.rest) == len(chunk_scatters(program, chunk))
                assert _by_table(destination, moves, source) == expected


def _poison(destination: Destination) -> None:
    for tensor in destination.tensors:
        tensor.view(-1).view(torch.uint8).fill_(0x5A)


def _bytes(destination: Destination) -> list[bytes]:
    return [t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in destination.tensors]


def _after(destination: Destination, dests: list[torch.Tensor], sources: list[torch.Tensor]) -> list[bytes]:
    _poison(destination)
    torch._foreach_copy_(dests, sources)
    return _bytes(destination)


def _by_table(destination: Destination, moves: ScatterMoves, source: torch.Tensor) -> list[bytes]:
    _poison(destination)
    bases = {1 + i: destination.tensors[row].view(-1).view(torch.uint8) for i, row in enumerate(moves.rows)}
    carry_out(tabulate(moves.moves, 16), {0: source} | bases)
    assert not moves.rest
    return _bytes(destination)


def test_a_move_of_many_dimensions_is_packed_by_rows() -> None:
    """What has more dimensions than the kernel takes is cut, so that packing never needs views."""
    shape = (2, 3, 2, 2, 4)
    assert prod(shape) > 0
    assert make_move((0, 1), shape, (400, 100, 30, 10, 2), (48, 16, 8, 4, 1), 0, 0, 2) is None
    assert make_move((0, 1), shape[1:], (100, 30, 10, 1), (16, 8, 4, 1), 0, 0, 2) is not None
