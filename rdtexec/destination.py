"""The destination: a live model's parameters, held to the geometry that the plan was compiled for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from attrs import evolve, fields

from rdtexec.copies import ScatterMoves
from rdtexec.moves import Move, make_move
from rdtexec.plans import chunk_scatters
from rdtplan.errors import PlanMismatch
from rdtplan.ir.digests import geometry_digest, geometry_rows
from rdtplan.ir.dtypes import itemsize
from rdtplan.ir.plan import Program
from rdtplan.ir.regions import Region, contiguous_stride, refine
from rdtplan.ir.traces import Parameters
from rdtplan.trace.watch import Watched

_COLUMNS = ("name", "kind", "dtype", "shape", "stride", "aliases")


class Destination:
    """`tensors[k]` is the live tensor of the program's k-th parameter.

    PlanMismatch RDT501 when the model's geometry differs, naming the first field that does with both values.
    """

    def __init__(
        self, model: torch.nn.Module, program: Program, *, ties: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        """`ties` (name -> aliases) says which tensors of `model` stand for one, where the model itself cannot."""
        watched = Watched(model)
        wanted = set(program.parameters.names)
        touched = {k for k, name in enumerate(watched.names) if name in wanted}
        live, _, _ = watched.table(touched)
        if ties is not None:
            live = _tie(live, ties)
        if geometry_digest(live) != program.geometry_digest:
            _name_difference(geometry_rows(program.parameters), geometry_rows(live))
        found = dict(zip(watched.names, watched.tensors, strict=True))
        self.tensors = [found[name].data for name in program.parameters.names]
        self.program = program
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        self.moving = False
        """Do parameters get new memory in every sync, so that views of them must not be kept?"""

    def view(self, parameter: int, region: int) -> torch.Tensor:
        """The destination of a scatter, as a view of the live tensor."""
        if self.moving:
            return strided(self.tensors[parameter], self.program.regions[region])
        key = (parameter, region)
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = strided(self.tensors[parameter], self.program.regions[region])
        return found

    def fill(self, module: int | None) -> None:
        """Write the constants of one leaf module (None: of modules that no chunk touches)."""
        fills = self.program.fills
        for parameter, region, value in zip(fills.parameters, fills.regions, fills.values, strict=True):
            if self._module_of_fill(parameter) == module:
                self.view(parameter, region).fill_(value)

    def _module_of_fill(self, parameter: int) -> int | None:
        module = self.program.parameters.modules[parameter]
        return module if module in self.program.lifetimes.module else None

    def pairs_from_packed(
        self, chunk: int, packed: torch.Tensor, scatters: Iterable[int] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(destination views, source views) of one chunk out of its packed bytes (flat uint8).

        `scatters`, of all of the chunk's unless given.
        """
        program = self.program
        slices: dict[int, torch.Tensor] = {}
        dests: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for s in chunk_scatters(program, chunk) if scatters is None else scatters:
            key = program.scatters.key[s]
            if key not in slices:
                slices[key] = packed_slice(program, key, packed)
            dest = self.view(program.scatters.parameter[s], program.scatters.region[s])
            dests.append(dest)
            sources.append(slices[key].view(dest.shape))
        return dests, sources

    def pairs_from_sources(
        self, chunk: int, full: dict[int, torch.Tensor], scatters: Iterable[int] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(destination views, source views) of one chunk straight out of full source tensors, by manifest index.

        `scatters`, of all of the chunk's unless given.
        """
        program = self.program
        dests: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for s in chunk_scatters(program, chunk) if scatters is None else scatters:
            key = program.scatters.key[s]
            parameter = program.scatters.parameter[s]
            source = typed(full[program.keys.source[key]], program.dtype_table[program.keys.dtype[key]])
            a = program.regions[program.keys.region[key]]
            b = program.regions[program.scatters.region[s]]
            shape, stride_a, stride_b = refine(a, b)
            sources.append(strided(source, Region(shape, stride_a, a.offset)))
            dests.append(strided(self.tensors[parameter], Region(shape, stride_b, b.offset)))
        return dests, sources

    def written(self, chunk: int) -> list[torch.Tensor]:
        """Where the scatters of a chunk wrote, in plan order."""
        scatters = self.program.scatters
        return [self.view(scatters.parameter[s], scatters.region[s]) for s in chunk_scatters(self.program, chunk)]

    def moves(self, chunk: int, offsets: Mapping[int, int] | None) -> ScatterMoves:
        """The scatters of a chunk as moves, without a look at the tensors.

        They read full source tensors that lie `offsets[manifest index]` bytes behind base 0, or, for None, the packed
        chunk that base 0 is.
        """
        program = self.program
        rows: dict[int, int] = {}
        moves: list[Move] = []
        rest: list[int] = []
        for s in chunk_scatters(program, chunk):
            key, parameter = program.scatters.key[s], program.scatters.parameter[s]
            dtype = program.dtype_table[program.keys.dtype[key]]
            dest = program.regions[program.scatters.region[s]]
            move = None
            if dtype == program.parameters.dtypes[parameter]:
                bases = (0, rows.setdefault(parameter, 1 + len(rows)))
                if offsets is None:
                    stride, begin = contiguous_stride(dest.shape), program.keys.offset[key]
                    move = make_move(bases, dest.shape, stride, dest.stride, 0, dest.offset, itemsize(dtype))
                else:
                    source, begin = program.regions[program.keys.region[key]], offsets[program.keys.source[key]]
                    shape, a, b = refine(source, dest)
                    move = make_move(bases, shape, a, b, source.offset, dest.offset, itemsize(dtype))
            if move is None:
                rest.append(s)
            else:
                moves.append(evolve(move, source_at=move.source_at + begin))
        return ScatterMoves(tuple(moves), tuple(rows), tuple(rest))


def _tie(live: Parameters, ties: Mapping[str, tuple[str, ...]]) -> Parameters:
    """The table with tied names in one row each."""
    hidden = {alias for aliases in ties.values() for alias in aliases}
    keep = [k for k, name in enumerate(live.names) if name not in hidden]
    columns = {
        a.name: tuple(getattr(live, a.name)[k] for k in keep)
        for a in fields(Parameters)
        if a.name not in ("aliases", "module_names")
    }
    aliases = tuple(tuple(sorted(ties.get(live.names[k], ()))) for k in keep)
    return Parameters(**columns, aliases=aliases, module_names=live.module_names)


def strided(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """A region of a tensor; offsets count from the tensor's own first element."""
    return tensor.as_strided(region.shape, region.stride, region.offset + tensor.storage_offset())


def typed(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """A contiguous full tensor as a flat tensor of `dtype` (the plan may read it under another element type)."""
    flat = tensor.reshape(-1)
    wanted = getattr(torch, dtype)
    return flat if flat.dtype == wanted else flat.view(wanted)


def packed_slice(program: Program, key: int, packed: torch.Tensor) -> torch.Tensor:
    """One FetchKey's slice of a packed chunk, flat and typed."""
    dtype = getattr(torch, program.dtype_table[program.keys.dtype[key]])
    nbytes = program.regions[program.keys.region[key]].numel * dtype.itemsize
    offset = program.keys.offset[key]
    return packed[offset : offset + nbytes].view(dtype)


def _name_difference(planned: list[list[object]], live: list[list[object]]) -> None:
    have = {row[0]: row for row in live}
    for row in planned:
        actual = have.pop(row[0], None)
        if actual is None:
            raise _mismatch(f"parameter {row[0]!r}: the plan writes it, the model does not have it")
        for column, a, b in zip(_COLUMNS, row, actual, strict=True):
            if a != b:
                raise _mismatch(f"parameter {row[0]!r}: {column}: plan {a}, model {b}")
    if have:
        raise _mismatch(f"parameter {next(iter(have))!r}: the plan does not know it, the model has it")
    raise _mismatch("the parameters are the same, but the model lists them in another order")


def _mismatch(what: str) -> PlanMismatch:
    return PlanMismatch(
        what,
        fix="compile the plan with the config, vLLM version and engine arguments that this worker runs",
        code="RDT501",
    )
