"""Weights as the ranks hold them: every rank publishes its own shards, and nothing is gathered.

A shard is a box of the full tensor (FSDP2 cuts rows, tensor parallelism any dimension), declared as a piece; the plan
cuts what workers fetch at the borders and has each part pulled from the rank that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from rdtexec.sources.base import ParamMeta, Source
from rdtexec.sources.module import Rename, SentDtype, Split, _distributed, _fsdp_modules, _Place, _places
from rdtexec.sources.names import strip_wrappers, whole
from rdtplan.errors import InputError, TransferError
from rdtplan.ir.manifest import Ints, Piece
from rdtplan.ir.pieces import part, piece_name
from rdtplan.ir.regions import Region, contiguous_stride, digits

Box = tuple[Ints, Ints]
"""Offsets and sizes."""


@frozen
class _Held:
    """A piece that this rank holds: a region of its shard of a parameter."""

    place: _Place
    region: Region
    sizes: Ints
    dtype: torch.dtype


@frozen
class _Declared:
    """A weight of the checkpoint as one rank sees it."""

    name: str
    dtype: torch.dtype
    shape: Ints
    boxes: tuple[Box, ...]
    """What this rank holds of it."""


class ShardSource(Source):
    """The shards of a module's parameters and persistent buffers, where every rank has some of each or some of them.

    Make it after sharding (FSDP2's `fully_shard`, tensor parallelism by DTensor), on every rank: it is a collective.
    `rename` and `split` are those of `ModuleSource`; `split` must cut views. vLLM's own engines, which ask for full
    tensors, cannot use it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        rename: Rename = strip_wrappers,
        split: Split = whole,
        dtype: SentDtype = None,
    ) -> None:
        """InputError RDT114 when a parameter is no tensor of shards, or ranks disagree about a weight."""
        self._dtype = dtype
        self._sharded = _fsdp_modules(module)
        self._held: dict[str, _Held] = {}
        self.start()
        declared = [d for place in _places(module, rename) for d in self._declare(place, split)]
        rank = dist.get_rank() if _distributed() else 0
        super().__init__(_merged(declared), rank)

    def start(self) -> None:
        """FSDP2 may have left its root's parameters unsharded; the shards are the weights."""
        for module in self._sharded:
            module.reshard()  # type: ignore[operator]

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The pieces of these names, each as this rank holds it: no communication."""
        for name in names:
            held = self._held.get(name)
            if held is None:
                raise TransferError(
                    f"trainer rank {self.rank} is asked for {name!r}, which it does not hold",
                    fix="compile the plan with the shards that the trainer really has",
                    code="RDT607",
                )
            local: Any = held.place.tensor()
            local = local.to_local() if hasattr(local, "to_local") else local
            r = held.region
            view = local.as_strided(r.shape, r.stride, local.storage_offset() + r.offset).reshape(held.sizes)
            yield name, view.to(held.dtype)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Not possible."""
        raise InputError("a ShardSource has no full tensors", fix="use ModuleSource, which gathers them", code="RDT114")

    def implements_iter_full(self) -> bool:
        return False

    def implements_iter_local(self) -> bool:
        return False

    def _declare(self, place: _Place, split: Split) -> Iterator[_Declared]:
        """The weights cut from one parameter, with what this rank holds of each."""
        tensor = place.tensor()
        mine = _box_of(place.path, tensor)
        wanted = self._dtype(place.renamed) if callable(self._dtype) else self._dtype
        dtype = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
        full = torch.empty(tuple(tensor.shape), dtype=dtype, device="meta")
        for name, view in split(place.renamed, full):
            shape = tuple(view.shape)
            boxes: list[Box] = []
            if view.untyped_storage()._cdata != full.untyped_storage()._cdata:
                raise _unusable(f"parameter {place.path!r}: `split` computes {name!r} instead of cutting a view")
            if mine is not None:
                source = Region(shape, tuple(view.stride()), view.storage_offset())
                whole_view = Region(shape, contiguous_stride(shape), 0)
                for _, local, at in part(tuple(tensor.shape), source, whole_view, [Piece(*mine, (0,))]):
                    boxes.append(_box_in(shape, at, name))
                    piece = piece_name(name, shape, Piece(*boxes[-1], (0,)))
                    self._held[piece] = _Held(place, local, boxes[-1][1], dtype)
            yield _Declared(name, dtype, shape, tuple(boxes))


def _box_of(path: str, tensor: torch.Tensor) -> Box | None:
    """What this rank holds of a parameter; None for nothing."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return (0,) * len(shape), shape
    if any(p.is_partial() for p in tensor.placements):
        raise _unusable(f"parameter {path!r} is held as partial sums {tensor.placements}")
    if tensor.device_mesh.get_coordinate() is None:
        return None
    sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    if tuple(local.shape) != tuple(sizes):
        raise _unusable(
            f"parameter {path!r}: this rank's shard has shape {tuple(local.shape)}, expected {tuple(sizes)}"
        )
    return (tuple(offsets), tuple(sizes)) if local.numel() else None


def _box_in(shape: Ints, region: Region, name: str) -> Box:
    """A region of a contiguous tensor as a box."""
    found = digits(shape, region)
    if found is None or any(m != 1 for d, m, n in found[0] if n > 1):
        raise _unusable(f"{name!r}: what this rank holds of it is no box")
    return tuple(lo for lo, _ in found[1]), tuple(hi - lo + 1 for lo, hi in found[1])


def _merged(mine: list[_Declared]) -> list[ParamMeta]:
    """The whole model: pieces of every weight over all ranks, the same everywhere."""
    everyone: list[list[_Declared]] = [mine]
    if _distributed():
        everyone = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
    first: dict[str, tuple[int, _Declared]] = {}
    ranks_of: dict[str, dict[Box, list[int]]] = {}
    for rank, declared in enumerate(everyone):
        for d in declared:
            known, other = first.setdefault(d.name, (rank, d))
            if (other.dtype, other.shape) != (d.dtype, d.shape):
                raise _unusable(
                    f"trainer rank {known} has {d.name!r} as {other.dtype} {other.shape}, rank {rank} as {d.dtype} "
                    f"{d.shape}"
                )
            for box in d.boxes:
                ranks_of.setdefault(d.name, {}).setdefault(box, []).append(rank)
    found: list[ParamMeta] = []
    for name, (_, d) in first.items():
        pieces = tuple(Piece(*box, tuple(ranks)) for box, ranks in sorted(ranks_of.get(name, {}).items()))
        if len(pieces) == 1 and pieces[0].sizes == d.shape:
            everywhere = len(pieces[0].ranks) == len(everyone)
            found.append(ParamMeta(name, d.dtype, d.shape, None if everywhere else pieces[0].ranks))
        else:
            found.append(ParamMeta(name, d.dtype, d.shape, None, pieces=pieces))
    return found


def _unusable(what: str) -> InputError:
    return InputError(what, fix="use ModuleSource or LocalModuleSource, which gather", code="RDT114")
