"""Region arithmetic against plain enumeration of elements."""

from __future__ import annotations

import doctest
from collections import Counter
from itertools import pairwise
from math import prod

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import View, elements

import rdtplan.ir.regions
from rdtplan.ir.regions import (
    Coverage,
    Region,
    canonical,
    compose,
    contiguous_stride,
    cover,
    overlap,
    refine,
    runs,
    span,
    split_pair,
)

EMPTY = Region((0,), (1,), 0)


@st.composite
def regions(draw: st.DrawFn, least: int = 0, offsets: int = 5) -> Region:
    """Any descriptor of few elements: strides of 0, permuted, with holes, overlapping; not canonical."""
    shape = draw(st.lists(st.integers(least, 4), max_size=3))
    stride = [draw(st.sampled_from((0, 1, 2, 3, 4, 6, 8, 12, 16))) for _ in shape]
    return Region(tuple(shape), tuple(stride), draw(st.integers(0, offsets)))


@st.composite
def respelled(draw: st.DrawFn, region: Region) -> Region:
    """The same elements in the same order, with dimensions split and size-1 dimensions put in."""
    shape: list[int] = []
    stride: list[int] = []
    for n, s in zip(region.shape, region.stride, strict=True):
        inner = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) if n else 1
        shape += [n // inner, inner] if n else [0]
        stride += [s * inner, s] if n else [s]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(shape)))
        shape.insert(at, 1)
        stride.insert(at, draw(st.integers(0, 20)))
    return Region(tuple(shape), tuple(stride), region.offset)


@st.composite
def copies(draw: st.DrawFn) -> tuple[Region, Region, Region, Region]:
    """(source, destination) of one copy as loaders make them, full descriptors and canonical ones.

    Both are views of tensors that may be padded or permuted, of one logical shape.
    """
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))

    def side() -> Region:
        order = draw(st.permutations(range(len(shape))))
        padded = tuple(shape[d] + draw(st.sampled_from((0, 0, 2))) for d in order)
        strides = dict(zip(order, contiguous_stride(padded), strict=True))
        return Region(shape, tuple(strides[d] for d in range(len(shape))), draw(st.integers(0, 9)))

    a, b = side(), side()
    return a, b, canonical(*_parts(a)), canonical(*_parts(b))


def _parts(r: Region) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return r.shape, r.stride, r.offset


def test_docstring_examples() -> None:
    assert doctest.testmod(rdtplan.ir.regions).failed == 0


# -- canonical -----------------------------------------------------------------------------------------------


@given(regions())
def test_canonical_lists_the_same_elements_in_the_same_order(r: Region) -> None:
    c = canonical(*_parts(r))
    assert elements(c) == elements(r)
    assert canonical(*_parts(c)) == c
    assert all(n > 1 for n in c.shape) or c == EMPTY


@given(st.data())
def test_canonical_is_one_for_all_spellings(data: st.DataObject) -> None:
    r = data.draw(regions())
    assert canonical(*_parts(data.draw(respelled(r)))) == canonical(*_parts(r))


@given(regions(), regions())
def test_canonical_is_equal_exactly_when_the_elements_are(a: Region, b: Region) -> None:
    assert (canonical(*_parts(a)) == canonical(*_parts(b))) == (elements(a) == elements(b))


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((), (), Region((), (), 7)),
        ((1, 1), (5, 9), Region((), (), 7)),
        ((2, 3), (3, 1), Region((6,), (1,), 7)),
        ((2, 3), (8, 1), Region((2, 3), (8, 1), 7)),
        ((3, 2), (1, 3), Region((3, 2), (1, 3), 7)),
        ((4, 5), (0, 0), Region((20,), (0,), 7)),
        ((2, 0, 3), (3, 3, 1), EMPTY),
    ],
)
def test_canonical_examples(shape: tuple[int, ...], stride: tuple[int, ...], expected: Region) -> None:
    assert canonical(shape, stride, 7) == expected


@given(regions(least=1))
def test_span_and_runs_are_the_elements(r: Region) -> None:
    listed = elements(r)
    assert span(r) == (min(listed), max(listed) + 1)
    assert [k for a, b in runs(r) for k in range(a, b)] == listed


@given(regions())
def test_runs_of_any_region(r: Region) -> None:
    assert [k for a, b in runs(r) for k in range(a, b)] == elements(r)


# -- refine and split ----------------------------------------------------------------------------------------


@given(copies())
def test_refine_gives_both_sides_one_shape(copy: tuple[Region, Region, Region, Region]) -> None:
    full_a, full_b, a, b = copy
    shape, stride_a, stride_b = refine(a, b)
    assert elements(Region(shape, stride_a, a.offset)) == elements(full_a)
    assert elements(Region(shape, stride_b, b.offset)) == elements(full_b)


@given(copies(), st.integers(-1, 130), st.lists(st.integers(1, 30), max_size=2))
def test_split_pieces_partition_the_copy(
    copy: tuple[Region, Region, Region, Region], limit: int, rows: list[int]
) -> None:
    full_a, full_b, a, b = copy
    pieces = list(split_pair(a, b, limit, tuple(sorted(rows, reverse=True))))
    assert all(0 < x.numel == y.numel <= max(1, limit) for x, y in pieces)
    assert [k for x, _ in pieces for k in elements(x)] == elements(full_a)
    assert [k for _, y in pieces for k in elements(y)] == elements(full_b)
    assert all(canonical(*_parts(r)) == r for piece in pieces for r in piece)


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 300))
def test_a_matrix_is_cut_between_rows_when_a_row_fits(n_rows: int, width: int, limit: int) -> None:
    whole = View.full((n_rows, width)).region
    pieces = [a for a, _ in split_pair(whole, whole, limit, (width,))]
    assert [k for p in pieces for k in elements(p)] == list(range(n_rows * width))
    if limit >= width:
        assert all(p.offset % width == 0 and p.numel % width == 0 for p in pieces)
        sizes = [p.numel // width for p in pieces]
        assert max(sizes) - min(sizes) <= 1 and len(pieces) == -(-n_rows // (limit // width))
    else:
        assert all(p.offset // width == (p.offset + p.numel - 1) // width for p in pieces)


def test_an_expert_tensor_is_cut_between_experts_then_between_rows() -> None:
    whole = View.full((4, 6, 5)).region
    assert [a.offset for a, _ in split_pair(whole, whole, 60, (30, 5))] == [0, 60]
    assert [a.offset for a, _ in split_pair(whole, whole, 29, (30, 5))] == [0, 15, 30, 45, 60, 75, 90, 105]


def test_refine_refuses_what_has_no_common_shape() -> None:
    for a, b in (
        (Region((6,), (1,), 0), Region((4,), (1,), 0)),
        (Region((2, 3), (8, 1), 0), Region((3, 2), (8, 1), 0)),
        (EMPTY, Region((2,), (1,), 0)),
        (Region((2,), (1,), 0), EMPTY),
        (Region((), (), 0), Region((2,), (1,), 0)),
    ):
        with pytest.raises(ValueError, match="no common shape"):
            refine(a, b)


def test_empty_and_single_regions_refine() -> None:
    assert refine(EMPTY, EMPTY) == ((0,), (1,), (1,))
    assert refine(Region((), (), 3), Region((1, 1), (4, 4), 5)) == ((), (), ())
    assert list(split_pair(EMPTY, EMPTY, 1)) == [(EMPTY, EMPTY)]


# -- cover ---------------------------------------------------------------------------------------------------


def brute_cover(extent: Region, held: list[Region]) -> tuple[set[int], set[int], Region | None]:
    """Elements never held, elements held twice, and the first region that leaves the extent."""
    wanted = set(elements(extent))
    count = Counter(k for r in held for k in elements(r))
    leaves = next((r for r in held if set(elements(r)) - wanted), None)
    return wanted - set(count), {k for k, n in count.items() if n > 1}, leaves


def check_cover(extent: Region, held: list[Region]) -> Coverage:
    found = cover(extent, held)
    missing, twice, leaves = brute_cover(extent, held)
    assert found.missing == len(missing)
    assert (found.first_gap is None) == (not missing)
    if found.first_gap is not None:
        lo, hi = found.first_gap
        assert lo == min(missing) and set(range(lo, hi)) <= missing
    assert (found.first_overlap is None) == (not twice)
    if found.first_overlap is not None:
        lo, hi = found.first_overlap
        assert lo == min(twice) and set(range(lo, hi)) <= twice
    assert found.out_of_bounds == (None if leaves is None else span(leaves))
    assert found.exact == (not missing and not twice and leaves is None)
    return found


@settings(max_examples=400)
@given(regions(offsets=30), st.lists(regions(offsets=60), max_size=4))
def test_cover_counts_as_enumeration_does(extent: Region, held: list[Region]) -> None:
    check_cover(extent, held)


@settings(max_examples=300)
@given(st.data())
def test_cover_of_tilings_with_one_fault(data: st.DataObject) -> None:
    """Tiles of a matrix are exact in any order; one left out, doubled or moved is found."""
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    matrix = View.full((rows, columns + data.draw(st.integers(0, 2)))).narrow(1, 0, columns)
    if data.draw(st.booleans()):
        matrix = matrix.t()
    row_cuts = sorted({0, matrix.shape[0], *data.draw(st.lists(st.integers(0, matrix.shape[0]), max_size=2))})
    column_cuts = sorted({0, matrix.shape[1], *data.draw(st.lists(st.integers(0, matrix.shape[1]), max_size=2))})
    tiles = [
        matrix.narrow(0, a, b - a).narrow(1, c, d - c).region
        for a, b in pairwise(row_cuts)
        for c, d in pairwise(column_cuts)
    ]
    tiles = data.draw(st.permutations(tiles))
    assert check_cover(matrix.region, tiles).exact
    victim = data.draw(st.sampled_from(tiles))
    others = list(tiles)
    others.remove(victim)
    assert check_cover(matrix.region, others).missing == victim.numel
    assert check_cover(matrix.region, [*tiles, victim]).first_overlap
    moved = Region(victim.shape, victim.stride, victim.offset + prod((rows, columns + 2)))
    assert check_cover(matrix.region, [*others, moved]).out_of_bounds


def test_cover_of_an_extent_whose_rows_do_not_ascend() -> None:
    """A permuted parameter with holes, each element by its own write: no gap is there to be found."""
    extent = Region((2, 3), (1, 4), 0)
    held = [Region((2,), (1,), k) for k in (0, 4, 8)]
    assert check_cover(extent, held).exact


def test_cover_of_nothing() -> None:
    assert check_cover(EMPTY, []).exact
    assert check_cover(EMPTY, [EMPTY]).exact
    assert check_cover(EMPTY, [Region((), (), 0)]).out_of_bounds == (0, 1)


# -- composition ---------------------------------------------------------------------------------------------


@st.composite
def nested(draw: st.DrawFn) -> tuple[Region, Region]:
    """A region and a region of its elements."""
    sizes = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), max_size=3))
    strides = [draw(st.sampled_from((0, 1, 2, 5, 7, 12))) for _ in sizes]
    outer = canonical(sizes, strides, draw(st.integers(0, 5)))
    inner_sizes = draw(st.lists(st.sampled_from((1, 2, 3, 4)), max_size=3))
    inner_strides = [draw(st.sampled_from((0, 1, 2, 3, 4, 6, 8, 12))) for _ in inner_sizes]
    inner = canonical(inner_sizes, inner_strides, draw(st.integers(0, 3)))
    assume(span(inner)[1] <= outer.numel)
    return outer, inner


@given(nested())
def test_a_composition_picks_the_elements_of_both(pair: tuple[Region, Region]) -> None:
    """Rule: composing gives, in order, the elements of the outer region that the inner one names, or nothing."""
    outer, inner = pair
    found = compose(outer, inner)
    listed = elements(outer)
    if found is not None:
        assert elements(found) == [listed[k] for k in elements(inner)]
        assert found == canonical(found.shape, found.stride, found.offset)


@given(nested())
def test_all_of_a_region_composes(pair: tuple[Region, Region]) -> None:
    """Rule: all of a region, and any run of whole rows of it, is a region again."""
    outer, _ = pair
    assert compose(outer, canonical((outer.numel,), (1,), 0)) == outer
    if outer.shape:
        row = outer.numel // outer.shape[0]
        for k in range(outer.shape[0]):
            part = compose(outer, canonical((row,), (1,), k * row))
            assert part is not None and elements(part) == elements(outer)[k * row : (k + 1) * row]


@given(nested(), st.integers(0, 20))
def test_overlap_is_a_common_element(pair: tuple[Region, Region], shift: int) -> None:
    a, b = pair
    b = Region(b.shape, b.stride, b.offset + shift)
    assert overlap(a, b) == bool(set(elements(a)) & set(elements(b))) == overlap(b, a)
