"""Put the experts where they are wanted: with EPLB a slot may hold any of them.

The traces say what vLLM's loaders put into every slot. A slot that is to hold expert 5 is loaded as the first slot is
that they loaded expert 5 into, on whichever worker that is: the same slices of the same sources go to the same places
of the other slot. So no name of a source is read and nothing is known of its form, be it a tensor an expert, one for
all of them, or a scale. Slots that the loaders left empty are loaded so, too.

>>> donors({0: 0, 1: 1, 2: 2, 3: 0}, (2, 1, 1, 0))
[2, 1, 1, 3]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import merge
from itertools import chain
from typing import TypeVar

from attrs import evolve, fields, frozen

from rdtplan.errors import InputError, PlanError
from rdtplan.ir.experts import Experts, Placement, by_slot
from rdtplan.ir.manifest import Ints
from rdtplan.ir.regions import Region
from rdtplan.ir.traces import Fetches, RankTrace
from rdtplan.passes.draft import Draft, ProgramDraft

_K = TypeVar("_K")


def place_experts(draft: Draft) -> Draft:
    """Every slot holds the expert that `draft.placement` wants there; without one, that of the traces.

    InputError RDT120 for a placement that does not fit the model, PlanError RDT306 for slots that are not copies.
    """
    traces = [p.trace for p in draft.programs]
    traced = {module: row for t in traces for module, row in t.experts.rows().items()}
    logical = {m: n for t in traces for m, n in zip(t.experts.modules, t.experts.logical, strict=True)}
    wanted = _wanted(draft.placement, traced, logical)
    if not traced:
        return draft
    loads: dict[str, dict[int, _Load]] = {module: {} for module in traced}
    for trace in traces:
        for module, slots in _loads(trace).items():
            for slot, load in slots.items():
                loads[module].setdefault(slot, load)
    new: dict[str, list[_Load]] = {}
    empty = sum(len(row) - len(loads[module]) for module, row in traced.items())
    for module, slots in loads.items():
        held = {slot: traced[module][slot] for slot in sorted(slots)}
        chosen = donors(held, wanted[module])
        if any(donor not in (None, slot) for slot, donor in enumerate(chosen)):
            new[module] = [_NOTHING if donor is None else slots[donor] for donor in chosen]
    programs = tuple(ProgramDraft(_placed(trace, wanted, new)) for trace in traces)
    return evolve(draft, programs=programs, notes=(*draft.notes, *([_EMPTY.format(empty)] if empty else ())))


_EMPTY = (
    "vLLM's own loaders leave {} redundant slots of experts empty; the plan loads them like the other slots of their "
    "experts"
)


def donors(held: Mapping[int, int], wanted: Ints) -> list[int | None]:
    """For every slot, itself where it holds the expert that `wanted` has there, else the first that does.

    `held` has the slots that were loaded, ascending; None: nobody loaded this expert.
    """
    first: dict[int, int] = {}
    for slot, expert in held.items():
        first.setdefault(expert, slot)
    return [slot if held.get(slot) == expert else first.get(expert) for slot, expert in enumerate(wanted)]


# -- what is wanted ------------------------------------------------------------------------------------------------


def _wanted(placement: Placement | None, traced: Mapping[str, Ints], logical: Mapping[str, int]) -> dict[str, Ints]:
    if placement is None:
        return dict(traced)
    if not traced:
        raise _misfit(
            "a placement of experts is given, and the plan has no layer of experts that could be placed",
            "compile for a mixture of experts with EPLB on (--redundant-experts), or leave the placement out",
        )
    rows = placement if isinstance(placement, Mapping) else dict.fromkeys(traced, tuple(placement))
    for module in (*traced, *rows):
        if module not in rows or module not in traced:
            what = "the placement does not have it" if module in traced else "the model has no such layer of experts"
            layers = f"the layers of experts are {next(iter(traced))} and {len(traced) - 1} more"
            raise _misfit(f"layer {module!r}: {what}", f"give a row for every layer, or one row for all; {layers}")
    for module, row in rows.items():
        slots, experts = len(traced[module]), logical[module]
        missing = sorted(set(range(experts)) - set(row))
        outside = next((slot for slot, expert in enumerate(row) if not 0 <= expert < experts), None)
        where = f"the placement of layer {module!r}"
        if len(row) != slots:
            raise _misfit(f"{where} has {len(row)} slots, the model {slots}", "give the logical expert of every slot")
        if outside is not None:
            raise _misfit(f"{where} has expert {row[outside]} in slot {outside}, its experts are 0 to {experts - 1}")
        if missing:
            raise _misfit(f"{where} has expert {missing[0]} in no slot, and {len(missing) - 1} more are missing")
    return dict(rows)


def _misfit(
    what: str, fix: str = "every expert must be in at least one slot; dump the placement from the workers"
) -> InputError:
    return InputError(what, fix=fix, code="RDT120")


# -- what is loaded ------------------------------------------------------------------------------------------------


@frozen(slots=True)
class _Piece:
    """One copy into a slot, with nothing of the worker in it that it was traced on."""

    source: int
    dtype: str
    taken: Region
    place: Region
    loader: str
    chain: tuple[str, ...]


_Load = dict[str, list[_Piece]]
"""Parameter -> all that goes into one slot of it, in record order."""
_NOTHING: _Load = {}


def _loads(trace: RankTrace) -> dict[str, dict[int, _Load]]:
    """Layer -> slot -> what is loaded into it."""
    experts, f = trace.experts, trace.fetches
    found: dict[str, dict[int, _Load]] = {module: {} for module in experts.modules}
    of = _of_parameter(experts)
    for source, dtype, src, row, dest, loader, words in zip(
        f.sources, f.dtypes, f.source_regions, f.parameters, f.dest_regions, f.loaders, f.chains, strict=True
    ):
        if row not in of:
            continue
        layer, first = of[row]
        name = trace.parameters.names[row]
        for slot, taken, place in _by_slot(trace, trace.regions[src], trace.regions[dest], row):
            load = found[experts.modules[layer]].setdefault(first + slot, {})
            piece = _Piece(source, trace.dtype_table[dtype], taken, place, trace.loaders[loader], trace.chains[words])
            load.setdefault(name, []).append(piece)
    return found


def _of_parameter(experts: Experts) -> dict[int, tuple[int, int]]:
    """Parameter -> (layer, first slot)."""
    columns = zip(experts.parameters, experts.layers, experts.first, strict=True)
    return {row: (layer, first) for row, layer, first in columns}


def _by_slot(trace: RankTrace, source: Region, dest: Region, row: int) -> Iterable[tuple[int, Region, Region]]:
    try:
        return list(by_slot(source, dest, trace.parameters.strides[row][0]))
    except ValueError as error:
        raise _not_alike(
            f"a copy into {trace.parameters.names[row]!r} cannot be told apart by slots: {error}"
        ) from None


def _not_alike(what: str) -> PlanError:
    return PlanError(
        f"the experts cannot be placed: {what}",
        fix="use the placement that vLLM starts with, or run this model without EPLB",
        code="RDT306",
    )


# -- one worker ----------------------------------------------------------------------------------------------------


def _placed(trace: RankTrace, wanted: Mapping[str, Ints], new: Mapping[str, Sequence[_Load]]) -> RankTrace:
    experts = trace.experts
    flat = tuple(expert for module in experts.modules for expert in wanted[module])
    trace = evolve(trace, experts=evolve(experts, experts=flat))
    moving = {row: at for row, at in _of_parameter(experts).items() if experts.modules[at[0]] in new}
    if not moving:
        return trace
    _check_copied(trace, moving)
    regions = {region: k for k, region in enumerate(trace.regions)}
    dtypes = {dtype: k for k, dtype in enumerate(trace.dtype_table)}
    loaders = {loader: k for k, loader in enumerate(trace.loaders)}
    chains = {chain: k for k, chain in enumerate(trace.chains)}

    rows: list[tuple[tuple[int, int, int], Ints]] = []
    for row, (layer, first) in moving.items():
        name, size = trace.parameters.names[row], trace.parameters.strides[row][0]
        for slot in range(trace.parameters.shapes[row][0]):
            for piece in new[experts.modules[layer]][first + slot].get(name, ()):
                place = Region(piece.place.shape, piece.place.stride, piece.place.offset + slot * size)
                line = (
                    *(piece.source, _number(dtypes, piece.dtype), _number(regions, piece.taken)),
                    *(row, _number(regions, place), _number(loaders, piece.loader), _number(chains, piece.chain)),
                )
                rows.append(((piece.source, slot, row), line))
    rows.sort(key=lambda entry: entry[0])  # the order of the manifest, in which loaders work
    columns = (getattr(trace.fetches, column.name) for column in fields(Fetches))
    kept = [line for line in zip(*columns, strict=True) if line[3] not in moving]
    lines = list(merge(kept, (line for _, line in rows), key=lambda line: line[0]))
    placed = evolve(
        trace,
        regions=tuple(regions),
        dtype_table=tuple(dtypes),
        loaders=tuple(loaders),
        chains=tuple(chains),
        fetches=Fetches(*zip(*lines, strict=True)),
    )
    return _renumbered(placed)


def _number(table: dict[_K, int], value: _K) -> int:
    return table.setdefault(value, len(table))


def _check_copied(trace: RankTrace, moving: Mapping[int, tuple[int, int]]) -> None:
    """What is computed, or filled in one slot and not in another, stays where it is: such slots cannot change hands."""
    names = trace.parameters.names
    for row in (*trace.operations.parameters, *trace.leaves.rows):
        if row in moving:
            raise _not_alike(f"{names[row]!r} is computed and not copied")
    filled: dict[int, dict[int, list[tuple[Region, float, int]]]] = {}
    f = trace.fills
    for row, region, value, before in zip(f.parameters, f.regions, f.values, f.before, strict=True):
        if row in moving:
            for slot, _, place in _by_slot(trace, trace.regions[region], trace.regions[region], row):
                filled.setdefault(row, {}).setdefault(slot, []).append((place, value, before))
    for row, slots in filled.items():
        if any(slots.get(slot) != slots.get(0) for slot in range(trace.parameters.shapes[row][0])):
            raise _not_alike(f"constants go into some slots of {names[row]!r} and not into others")


def _renumbered(trace: RankTrace) -> RankTrace:
    """Regions by first use, those alone that are used."""
    f, fills, operations, leaves = trace.fetches, trace.fills, trace.operations, trace.leaves
    pairs = (region for pair in zip(f.source_regions, f.dest_regions, strict=True) for region in pair)
    ids: dict[int, int] = {}
    for region in chain(pairs, fills.regions, operations.regions, leaves.regions):
        _number(ids, region)

    def again(column: Ints) -> Ints:
        return tuple(map(ids.__getitem__, column))

    return evolve(
        trace,
        regions=tuple(trace.regions[region] for region in ids),
        fetches=evolve(f, source_regions=again(f.source_regions), dest_regions=again(f.dest_regions)),
        fills=evolve(fills, regions=again(fills.regions)),
        operations=evolve(operations, regions=again(operations.regions)),
        leaves=evolve(leaves, regions=again(leaves.regions)),
    )
