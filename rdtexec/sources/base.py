"""What all sources have in common: the declaration of the whole model, and the two vLLM APIs on top of `gather`.

vLLM 0.32 calls `metadata()` and `held_names()` and iterates the source, with None for a name that the rank does not
hold; 0.33 reads the property `metadata`, whose entries have `owners`, and iterates `iter_full()`, held names only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Self

import torch
from attrs import frozen

from rdtplan.errors import InputError, TransferError
from rdtplan.ir.manifest import Piece


@frozen
class ParamMeta:
    """One weight of the whole model, the same on every trainer rank."""

    name: str
    dtype: torch.dtype
    """As it is sent."""
    shape: tuple[int, ...]
    """Of the full tensor."""
    owners: tuple[int, ...] | None = None
    """Trainer ranks that hold it; None: all of them."""
    pieces: tuple[Piece, ...] = ()
    """Boxes in which ranks hold it; empty: its owners have all of it."""
    placements: None = None
    """vLLM 0.33 asks how a weight is laid out over its owners: here every owner gives all of it."""

    @property
    def mesh_shape(self) -> tuple[int, ...] | None:
        """The owners as vLLM 0.33's mesh."""
        return None if self.owners is None else (len(self.owners),)


class Metadata(list[ParamMeta]):
    """A list that, called, gives itself: vLLM 0.33 reads `source.metadata`, 0.32 calls it."""

    def __call__(self) -> Self:
        return self


class Source(ABC):
    """A trainer rank's weights. Subclasses declare `metadata` and give full tensors in `gather`."""

    def __init__(self, entries: Sequence[ParamMeta], rank: int = 0) -> None:
        """`rank` is this trainer rank, where ranks hold different names. InputError RDT106 when two have one name."""
        self._metadata, self.rank = declared(entries), rank

    @property
    def metadata(self) -> Metadata:
        """Every weight of the whole model, as of when the source was made."""
        return self._metadata

    @abstractmethod
    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The full tensors of `names`, which this rank holds, in that order, each made when it is asked for.

        It may be a collective of the ranks that hold a name: they must ask for it in the same order, as ranks of one
        plan do. TransferError RDT607 when a name cannot be given.
        """

    def start(self) -> None:
        """A sync begins: from now on `gather` gives the weights as they are now."""
        return None

    def partners(self, name: str) -> tuple[int, ...]:
        """Ranks that must all gather `name` for one of them to get it; none where it needs no collective."""
        return ()

    def held_names(self) -> frozenset[str] | None:
        """Names that this rank holds, None for all."""
        return None if all(m.owners is None for m in self.metadata) else frozenset(self.owned_names(self.rank))

    def owned_names(self, rank: int) -> list[str]:
        """Names that `rank` holds, in the order of the metadata."""
        return [m.name for m in self.metadata if m.owners is None or rank in m.owners]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """A pass over the layers that this rank holds any of, as vLLM 0.32 wants it: None for what others hold."""
        layers = _layers(self.metadata)
        held = set(self.owned_names(self.rank))
        mine = {layers[name] for name in held}
        full = self.iter_full()
        for m in self.metadata:
            if layers[m.name] in mine:
                yield next(full) if m.name in held else (m.name, None)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over the full tensors that this rank holds, in the order of the metadata."""
        self.start()
        yield from self.gather(self.owned_names(self.rank))

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over this rank's pieces. Every weight is declared replicated, so a piece is a full tensor."""
        return self.iter_full()

    def implements_iter_full(self) -> bool:
        """For vLLM 0.33."""
        return True

    def implements_iter_local(self) -> bool:
        """For vLLM 0.33."""
        return True


def declared(entries: Sequence[ParamMeta]) -> Metadata:
    """The metadata, after a look for names that stand there twice (InputError RDT106)."""
    seen: set[str] = set()
    for m in entries:
        if m.name in seen:
            raise InputError(
                f"the trainer's source has two weights of the name {m.name!r}",
                fix="let `rename` and `split` give every weight a name of its own",
                code="RDT106",
            )
        seen.add(m.name)
    return Metadata(entries)


def _layers(metadata: Metadata) -> dict[str, str]:
    """What vLLM 0.32 batches by: the path up to the outermost number of a name, else what comes before any or after."""
    found: dict[str, str] = {}
    unnumbered = "before"
    for m in metadata:
        parts = m.name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        found[m.name] = unnumbered if at is None else ".".join(parts[: at + 1])
        unnumbered = unnumbered if at is None else "after"
    return found


def not_held(name: str, rank: int) -> TransferError:
    """The plan has this rank serve a name that it does not hold."""
    return TransferError(
        f"trainer rank {rank} is asked for {name!r}, which it does not hold",
        fix="compile the plan with the owners that the trainer really has",
        code="RDT607",
    )
