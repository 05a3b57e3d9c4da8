"""A chunk's copies, ready to be carried out: by views and torch, or by a table and one kernel launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from attrs import field, frozen

from rdtexec.cuda_copy import CudaTable
from rdtexec.moves import Move

Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""(dest views, source views)"""


class Copy(Protocol):
    """What `ConsumerTransport.copies` gives."""

    def run(self) -> None:
        """Copy; on a GPU enqueue it on the current stream."""

    def written(self) -> Sequence[torch.Tensor]:
        """The destination of every scatter of the chunk, in plan order, as a view."""


@frozen
class ViewCopy:
    """Copies by views."""

    dests: list[torch.Tensor]
    sources: list[torch.Tensor]

    def run(self) -> None:
        if self.dests:
            torch._foreach_copy_(self.dests, self.sources)

    def written(self) -> Sequence[torch.Tensor]:
        return self.dests


@frozen
class ScatterMoves:
    """The scatters of one chunk as moves: base 0 is what they read, base 1 + i is parameter `rows[i]`."""

    moves: tuple[Move, ...]
    rows: tuple[int, ...]
    rest: tuple[int, ...]
    """Scatters that are no moves: they convert, or have too many dimensions. torch copies them."""


@frozen
class TableCopy:
    """Copies by a table, and what is left by views."""

    table: CudaTable
    bases: tuple[int, ...]
    rest: Callable[[], Pairs]
    views: Callable[[], Sequence[torch.Tensor]] = field(repr=False)

    def run(self) -> None:
        self.table.run(self.bases)
        dests, sources = self.rest()
        if dests:
            torch._foreach_copy_(dests, sources)

    def written(self) -> Sequence[torch.Tensor]:
        return self.views()
