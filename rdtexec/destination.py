"""The destination: a live model's parameters, held to the geometry that the plan was compiled for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from attrs import evolve, fields, frozen

from rdtexec.copies import ScatterMoves
from rdtexec.moves import Move, make_move
from rdtexec.operations import evaluate
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
        rows = list(zip(program.parameters.names, program.parameters.kinds, strict=True))
        self._operands = [row for row, (_, kind) in enumerate(rows) if kind == "operand"]
        self._no_operands = {row: _no_memory(program, row) for row in self._operands}
        self.tensors = [
            self._no_operands[r] if r in self._no_operands else found[n].data for r, (n, _) in enumerate(rows)
        ]
        self.program = program
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        self._packed: dict[int, _PackedCopy] = {}
        self._direct: dict[int, _DirectCopy] = {}
        """What there is to copy for each scatter, worked out the first time."""
        self.moving = bool(self._operands)
        """Do parameters or operands get new memory in every sync, so that views of them must not be kept?"""
        self._operations_of: dict[int | None, list[int]] = {}
        for k, parameter in enumerate(program.operations.parameters):
            self._operations_of.setdefault(self._module_of_fill(parameter), []).append(k)

    def check(self) -> None:
        """PlanMismatch when the model has changed since; asked before a sync is called complete. Parameters stay."""

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
        """Give a leaf module's operands memory and write its constants (None: of modules that no chunk touches)."""
        p, fills = self.program.parameters, self.program.fills
        for row in self._operands:
            if p.modules[row] == module:
                self.tensors[row] = torch.empty(p.shapes[row], dtype=self._no_operands[row].dtype, device=self.device)
        for parameter, region, value in zip(fills.parameters, fills.regions, fills.values, strict=True):
            if self._module_of_fill(parameter) == module:
                self.view(parameter, region).fill_(value)

    def evaluate(self, module: int | None) -> None:
        """Do a leaf module's local operations, in record order, and free its operands. Its scatters are all done."""
        program, operations, leaves = self.program, self.program.operations, self.program.leaves
        for k in self._operations_of.get(module, ()):
            rows = range(operations.leaf_end[k - 1] if k else 0, operations.leaf_end[k])
            read = [self.view(leaves.rows[at], leaves.regions[at]) for at in rows]
            value = evaluate(program.expressions[operations.expressions[k]], read, self.device)
            dest = self.view(operations.parameters[k], operations.regions[k])
            if value.untyped_storage()._cdata == dest.untyped_storage()._cdata:
                value = value.clone()  # the parameter rearranges itself
            dest.copy_(value.reshape(dest.shape))
        for row in self._operands:
            if program.parameters.modules[row] == module:
                if self.tensors[row].is_cuda:  # allocated on the scatter's stream, read on this one
                    self.tensors[row].record_stream(torch.cuda.current_stream())
                self.tensors[row] = self._no_operands[row]

    def _module_of_fill(self, parameter: int) -> int | None:
        module = self.program.parameters.modules[parameter]
        return module if module in self.program.lifetimes.module else None

    def pairs_from_packed(
        self, chunk: int, packed: torch.Tensor, scatters: Iterable[int] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(destination views, source views) of one chunk out of its packed bytes (flat uint8).

        `scatters`, of all of the chunk's unless given.
        """
        wanted = chunk_scatters(self.program, chunk) if scatters is None else scatters
        typed_bytes: dict[torch.dtype, tuple[torch.Tensor, int]] = {}
        dests: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for s in wanted:
            copy = self._packed.get(s) or self._packed.setdefault(s, self._packed_copy(s))
            if copy.dtype not in typed_bytes:
                typed_bytes[copy.dtype] = _as_dtype(packed, copy.dtype)
            dest = self.view(copy.parameter, copy.region)
            source, first = typed_bytes[copy.dtype]
            dests.append(dest)
            sources.append(source.as_strided(dest.shape, copy.stride, first + copy.offset))
        return dests, sources

    def _packed_copy(self, scatter: int) -> _PackedCopy:
        program = self.program
        key, region = program.scatters.key[scatter], program.scatters.region[scatter]
        dtype: torch.dtype = getattr(torch, program.dtype_table[program.keys.dtype[key]])
        stride = contiguous_stride(program.regions[region].shape)
        offset = program.keys.offset[key] // dtype.itemsize  # slices begin at multiples of 16 bytes
        return _PackedCopy(program.scatters.parameter[scatter], region, dtype, stride, offset)

    def pairs_from_sources(
        self, chunk: int, full: dict[int, torch.Tensor], scatters: Iterable[int] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(destination views, source views) of one chunk straight out of full source tensors, by manifest index.

        `scatters`, of all of the chunk's unless given.
        """
        dests: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for s in chunk_scatters(self.program, chunk) if scatters is None else scatters:
            copy = self._direct.get(s) or self._direct.setdefault(s, self._direct_copy(s))
            sources.append(strided(typed(full[copy.source], copy.dtype), copy.read))
            dests.append(strided(self.tensors[copy.parameter], copy.write))
        return dests, sources

    def _direct_copy(self, scatter: int) -> _DirectCopy:
        program = self.program
        key = program.scatters.key[scatter]
        a, b = program.regions[program.keys.region[key]], program.regions[program.scatters.region[scatter]]
        shape, stride_a, stride_b = refine(a, b)
        return _DirectCopy(
            program.keys.source[key],
            program.dtype_table[program.keys.dtype[key]],
            Region(shape, stride_a, a.offset),
            program.scatters.parameter[scatter],
            Region(shape, stride_b, b.offset),
        )

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


@frozen(slots=True)
class _PackedCopy:
    """One scatter out of a packed chunk: a dense source, so the destination's shape is the shape of both."""

    parameter: int
    region: int
    """Of the destination."""
    dtype: torch.dtype
    stride: tuple[int, ...]
    """Of the source."""
    offset: int
    """Of the source, in elements of `dtype`."""


@frozen(slots=True)
class _DirectCopy:
    """One scatter out of a full tensor: both ends in their common shape."""

    source: int
    dtype: str
    read: Region
    parameter: int
    write: Region


def _as_dtype(packed: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """The whole elements of flat bytes, and the storage offset of the first in elements."""
    whole = packed[: packed.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole, int(whole.storage_offset())


def _no_memory(program: Program, row: int) -> torch.Tensor:
    """Stands for an operand while no sync is under way."""
    p = program.parameters
    return torch.empty(p.shapes[row], dtype=getattr(torch, p.dtypes[row]), device="meta")


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
