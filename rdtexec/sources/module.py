"""Weights of a live torch module: plain tensors, and FSDP2 or other DTensors, gathered when their group's turn comes.

A gather holds a full tensor only until the last name cut from it was given out; what lives longer is what the receiver
keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from rdtexec.sources.base import ParamMeta, Source, declared, not_held
from rdtexec.sources.names import strip_wrappers, whole
from rdtplan.errors import InputError, TransferError

Rename = Callable[[str], str | None]
"""A parameter's name -> its name in the checkpoint, or None to leave it out."""
Split = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]
"""A renamed parameter -> the checkpoint's weights, as views. Also called with a meta tensor, for the shapes."""
SentDtype = torch.dtype | Callable[[str], torch.dtype | None] | None
"""What floating-point weights are cast to: one dtype, or one for each renamed parameter; None: as they are."""


@frozen
class _Place:
    """Where a tensor hangs. It is looked up anew for each sync, so a replaced parameter is noticed."""

    path: str
    renamed: str
    holder: torch.nn.Module
    leaf: str

    def tensor(self) -> torch.Tensor:
        found = getattr(self.holder, self.leaf, None)
        if not isinstance(found, torch.Tensor):
            raise TransferError(
                f"the module has no tensor {self.path!r} any more, found {found!r}",
                fix="make the source after the last change to the module's structure",
                code="RDT607",
            )
        return found.detach()


class ModuleSource(Source):
    """The parameters and persistent buffers of a module that every trainer rank has, whole or sharded (FSDP2).

    Make it after `fully_shard`, on every rank. Tied parameters are sent once, by their first name.

    >>> model = torch.nn.Linear(2, 3, bias=False)
    >>> source = ModuleSource(model, rename=lambda name: f"lm_head.{name}", dtype=torch.bfloat16)
    >>> [(m.name, m.dtype, m.shape) for m in source.metadata]
    [('lm_head.weight', torch.bfloat16, (3, 2))]
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        rename: Rename = strip_wrappers,
        split: Split = whole,
        dtype: SentDtype = None,
    ) -> None:
        """InputError RDT106 when two weights get one name, RDT114 when the module cannot be declared."""
        self._split, self._dtype = split, dtype
        self._sharded = _fsdp_modules(module)
        self.start()
        self._origin: dict[str, _Place] = {}
        entries: list[ParamMeta] = []
        for place in _places(module, rename):
            tensor = place.tensor()
            if not _is_here(tensor):
                self._refuse_absent(place, tensor)
                continue
            stand_in = torch.empty(tensor.shape, dtype=self._sent_dtype(place, tensor), device="meta")
            for name, piece in split(place.renamed, stand_in):
                self._origin[name] = place
                entries.append(ParamMeta(name, piece.dtype, tuple(piece.shape)))
        super().__init__(self._of_all_ranks(entries), dist.get_rank() if _distributed() else 0)

    def _of_all_ranks(self, mine: list[ParamMeta]) -> list[ParamMeta]:
        """Every rank has the same."""
        return mine

    def start(self) -> None:
        """Between a forward pass without backward and the next one, FSDP2 leaves its root's parameters unsharded.

        Those are copies, which the optimizer does not update; the shards are the weights.
        """
        for module in self._sharded:
            module.reshard()  # type: ignore[operator]

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            if name not in self._origin:
                raise not_held(name, self.rank)
        uses: dict[str, int] = {}
        for name in names:
            uses[self._origin[name].path] = uses.get(self._origin[name].path, 0) + 1
        cut: dict[str, dict[str, torch.Tensor]] = {}
        for name in names:
            place = self._origin[name]
            if place.path not in cut:
                cut[place.path] = dict(self._split(place.renamed, self._full_tensor(place)))
            uses[place.path] -= 1
            yield name, _take(cut, place.path, name, last=not uses[place.path])

    def partners(self, name: str) -> tuple[int, ...]:
        tensor = self._origin[name].tensor() if name in self._origin else None
        return () if getattr(tensor, "device_mesh", None) is None else tuple(_mesh_ranks(tensor))

    def _sent_dtype(self, place: _Place, tensor: torch.Tensor) -> torch.dtype:
        wanted = self._dtype(place.renamed) if callable(self._dtype) else self._dtype
        return wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype

    def _full_tensor(self, place: _Place) -> torch.Tensor:
        """A collective for a DTensor. It is cast first, which halves what FSDP's float32 shards send."""
        from torch.distributed.tensor import DTensor

        tensor: Any = place.tensor()
        dtype = self._sent_dtype(place, tensor)
        full: torch.Tensor
        if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
            full = tensor.full_tensor().to(dtype)  # a sum that is still to be taken must not be rounded
        else:
            sent: Any = tensor.to(dtype)
            full = sent.full_tensor() if isinstance(sent, DTensor) else sent
        return full

    def _refuse_absent(self, place: _Place, tensor: torch.Tensor) -> None:
        raise InputError(
            f"parameter {place.path!r} lives on ranks {_mesh_ranks(tensor)}, and this rank is none of them",
            fix="use LocalModuleSource, which agrees with the other ranks on who holds what",
            code="RDT114",
        )


class LocalModuleSource(ModuleSource):
    """The weights that this rank alone, or with some others, has: a pipeline stage, experts, any mix.

    Making it is a collective over all ranks of torch.distributed: each says what it has, and the metadata becomes the
    whole model, the same everywhere. `rename` and `split` turn local numbers of layers and experts into global ones.
    A name that several ranks give is held by all of them; if its dtype or shape differs, all ranks raise InputError
    RDT114.
    """

    def _of_all_ranks(self, mine: list[ParamMeta]) -> list[ParamMeta]:
        return _agreed(mine)

    def _refuse_absent(self, place: _Place, tensor: torch.Tensor) -> None:
        """Another rank declares it."""


def _places(module: torch.nn.Module, rename: Rename) -> Iterator[_Place]:
    """Parameters and persistent buffers in the module's order, tied ones once."""
    seen: set[int] = set()
    for prefix, holder in module.named_modules():
        buffers = [leaf for leaf in holder._buffers if leaf not in holder._non_persistent_buffers_set]
        for leaf in [*holder._parameters, *buffers]:
            tensor = getattr(holder, leaf)
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            path = f"{prefix}.{leaf}" if prefix else leaf
            renamed = rename(path)
            if renamed is not None:
                yield _Place(path, renamed, holder, leaf)


def _take(cut: dict[str, dict[str, torch.Tensor]], path: str, name: str, *, last: bool) -> torch.Tensor:
    """One piece of a cut parameter, out of the table; the rest goes with the last."""
    pieces = cut.pop(path) if last else cut[path]
    if name not in pieces:
        raise TransferError(
            f"`split` gave {name!r} when the source was made, and does not give it for the weights themselves",
            fix="`split` must not depend on values",
            code="RDT607",
        )
    return pieces.pop(name)


def _agreed(mine: list[ParamMeta]) -> list[ParamMeta]:
    """The whole model: what every rank has, in the order of ranks, with owners."""
    if not _distributed():
        return mine
    everyone: list[list[ParamMeta]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    first: dict[str, tuple[int, ParamMeta]] = {}
    owners: dict[str, list[int]] = {}
    for rank, entries in enumerate(everyone):
        for m in declared(entries):  # every rank looks at all of them, so all raise
            known, other = first.setdefault(m.name, (rank, m))
            if other != m:
                raise InputError(
                    f"trainer rank {known} has {m.name!r} as {other.dtype} {other.shape}, "
                    f"rank {rank} as {m.dtype} {m.shape}",
                    fix="mend `rename` or `split` on one of them: two different weights have one name",
                    code="RDT114",
                )
            owners.setdefault(m.name, []).append(rank)
    if all(len(ranks) == len(everyone) for ranks in owners.values()):
        return [m for _, m in first.values()]
    return [ParamMeta(m.name, m.dtype, m.shape, tuple(owners[m.name])) for _, m in first.values()]


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _fsdp_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def _is_here(tensor: torch.Tensor) -> bool:
    """Does this rank hold part of it?"""
    mesh = getattr(tensor, "device_mesh", None)
    return mesh is None or mesh.get_coordinate() is not None


def _mesh_ranks(tensor: Any) -> list[int]:
    ranks: list[int] = tensor.device_mesh.mesh.flatten().tolist()
    return ranks
