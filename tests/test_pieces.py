"""Sharded ownership: boxes of a tensor, and copies cut at their borders, element by element."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rdtplan.ir.manifest import Piece
from rdtplan.ir.pieces import chunked, part, piece_name, untiled
from rdtplan.ir.regions import Region, canonical, contiguous_stride


def indices(region: Region) -> list[int]:
    """Storage elements of a region in logical order."""
    found = [region.offset]
    for n, s in zip(region.shape, region.stride, strict=True):
        found = [f + i * s for f in found for i in range(n)]
    return found


def place(shape: tuple[int, ...], piece: Piece, within: int) -> int:
    """Element of the full tensor that is element `within` of a piece."""
    at = 0
    for o, n, inner, outer in zip(
        piece.offsets, piece.sizes, contiguous_stride(piece.sizes), contiguous_stride(shape), strict=True
    ):
        at += (o + within // inner % n) * outer
    return at


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Piece]]:
    """A tensor and boxes that tile it: every dimension cut at will, each box cut again or not."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        k = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes.pop(k)
        d = draw(st.integers(0, len(shape) - 1))
        if sizes[d] < 2:
            boxes.append((offsets, sizes))
            continue
        at = draw(st.integers(1, sizes[d] - 1))
        boxes.append((offsets, tuple(at if e == d else n for e, n in enumerate(sizes))))
        boxes.append(
            (
                tuple(o + at if e == d else o for e, o in enumerate(offsets)),
                tuple(n - at if e == d else n for e, n in enumerate(sizes)),
            )
        )
    return shape, [Piece(o, s, (rank,)) for rank, (o, s) in enumerate(boxes)]


@st.composite
def slices(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """What a loader may take: a range with a step of every dimension, dimensions in any order."""
    dims: list[tuple[int, int]] = []
    offset = 0
    for n, stride in zip(shape, contiguous_stride(shape), strict=True):
        lo = draw(st.integers(0, n - 1))
        step = draw(st.integers(1, 3))
        offset += lo * stride
        dims.append((draw(st.integers(1, (n - 1 - lo) // step + 1)), step * stride))
    dims = draw(st.permutations(dims))
    return canonical((n for n, _ in dims), (s for _, s in dims), offset)


@given(st.data())
def test_parts_copy_the_same_elements_to_the_same_places(data: st.DataObject) -> None:
    """Whatever the boxes and the slice: every element once, out of the piece that holds it."""
    shape, pieces = data.draw(tilings())
    source = data.draw(slices(shape))
    dest = Region((source.numel,), (1,), 7) if data.draw(st.booleans()) else source
    wanted = sorted(zip(indices(source), indices(dest), strict=True))
    found = []
    for k, a, b in part(shape, source, dest, pieces):
        assert a.numel == b.numel > 0
        assert max(indices(a)) < pieces[k].numel
        found += [(place(shape, pieces[k], i), j) for i, j in zip(indices(a), indices(b), strict=True)]
    assert sorted(found) == wanted


@given(st.data())
def test_repeated_elements_are_repeated(data: st.DataObject) -> None:
    """A step of 0 gives an element again and again, from one piece."""
    shape, pieces = data.draw(tilings())
    one = data.draw(slices(shape))
    assume(one.numel < 20)
    source = canonical((3, *one.shape), (0, *one.stride), one.offset)
    dest = Region((source.numel,), (1,), 0)
    found = [
        (place(shape, pieces[k], i), j)
        for k, a, b in part(shape, source, dest, pieces)
        for i, j in zip(indices(a), indices(b), strict=True)
    ]
    assert sorted(found) == sorted(zip(indices(source), indices(dest), strict=True))


@given(tilings())
def test_a_tiling_is_one_until_a_piece_changes(tiling: tuple[tuple[int, ...], list[Piece]]) -> None:
    """A gap, an overlap and a piece that leaves the tensor are named."""
    shape, pieces = tiling
    assert untiled(shape, pieces) == ""
    assert "elements" in untiled(shape, pieces[1:]) or not pieces[1:]
    assert "overlap" in untiled(shape, [*pieces, pieces[0]])
    moved = Piece(tuple(o + n for o, n in zip(pieces[0].offsets, shape, strict=True)), pieces[0].sizes, (0,))
    assert "leaves" in untiled(shape, [moved, *pieces[1:]])


@pytest.mark.parametrize(
    ("shape", "dim", "ranks", "sizes"),
    [((8, 2), 0, 4, [2, 2, 2, 2]), ((5, 2), 0, 4, [2, 2, 1]), ((2, 7), 1, 3, [3, 3, 1]), ((1,), 0, 2, [1])],
)
def test_chunks_are_those_of_torch(shape: tuple[int, ...], dim: int, ranks: int, sizes: list[int]) -> None:
    """Equal pieces, then a short one, then none."""
    torch: Any = pytest.importorskip("torch")
    found = chunked(shape, dim, range(ranks))
    assert [p.sizes[dim] for p in found] == sizes
    assert [p.sizes[dim] for p in found] == [c.shape[dim] for c in torch.empty(shape).chunk(ranks, dim)]
    assert untiled(shape, found) == ""
    assert len({piece_name("w", shape, p) for p in found}) == len(found)


def test_a_slice_across_dimensions_is_refused() -> None:
    """Elements that follow no dimension of the tensor cannot be cut at its boxes."""
    with pytest.raises(ValueError, match="does not follow the dimensions"):
        list(part((4, 6), Region((5,), (5,), 0), Region((5,), (1,), 0), chunked((4, 6), 0, (0, 1))))


def test_names_say_which_part() -> None:
    """The whole keeps the tensor's name."""
    assert piece_name("w", (4, 4), Piece((0, 0), (4, 4), (0,))) == "w"
    assert piece_name("w", (4, 4), Piece((2, 0), (2, 4), (0,))) == "w[2:4]"
    assert piece_name("w", (4, 4), Piece((2, 1), (2, 1), (0,))) == "w[2:4,1:2]"
    assert prod(Piece((2, 1), (2, 1), (0,)).sizes) == 2
