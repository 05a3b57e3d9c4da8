"""The alarm for a sync that sends what the last one sent: nothing was trained, or the wrong tensors are published.

A few elements of every tensor, evenly spaced, are kept from one sync to the next and compared. It costs one small copy
a group, and one look at the result a sync; an optimizer step that changes none of them in a whole rank has as good as
not happened.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve

from rdtexec.cuda_copy import CudaTable, on_gpu
from rdtexec.moves import make_move

ELEMENTS = 64
"""Most elements sampled of one tensor."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MODES = ("warn", "fail", "ignore")


class PayloadSample:
    """Compares what a rank publishes in one sync with what it published in the last."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[CudaTable, int, int]] = {}
        """On a GPU, by group: the table that samples its tensors, samples, and their bytes."""
        self.forget()

    def forget(self) -> None:
        """The last sync failed: what it sent is nothing to compare with."""
        self._last: dict[int, torch.Tensor] = {}
        self.start()

    def start(self) -> None:
        """A sync begins."""
        self.compared = 0
        """Elements compared so far."""
        self._differs: list[torch.Tensor] = []
        """For each group: is any of its samples another? Not looked at until somebody asks."""

    def prepare(self, group: int, sizes: Sequence[tuple[int, int]], device: torch.device) -> None:
        """Make the table of a group whose tensors will lie on a GPU, so that no sync compiles or loads a kernel.

        `sizes`: (elements, bytes of one) of its tensors, in the order in which `add` will get them.
        """
        if not self._tables:
            _differ(*torch.zeros(2, 1, dtype=torch.uint8, device=device))
        self._tables[group] = _table(sizes, device)

    def add(self, group: int, tensors: dict[int, torch.Tensor]) -> None:
        """Look at one gathered group; its tensors are contiguous, and in every sync of the same dtypes and shapes."""
        addresses = on_gpu(tensors)
        if addresses is None:
            full = sorted((t for t in tensors.values() if t.numel()), key=lambda t: -t.element_size())
            samples = sum(_count(t.numel()) for t in full)
            nbytes = sum(_count(t.numel()) * t.element_size() for t in full)
            now = torch.empty(nbytes, dtype=torch.uint8, device=full[0].device if full else None)
            _sample(full, now)
        else:
            device = next(iter(tensors.values())).device
            if group not in self._tables or self._tables[group][0].device != device:
                self.prepare(group, [(t.numel(), t.element_size()) for t in tensors.values()], device)
            table, samples, nbytes = self._tables[group]
            now = torch.empty(nbytes, dtype=torch.uint8, device=device)
            table.run([*addresses, now.data_ptr()])
        last = self._last.get(group)
        if last is not None and last.numel() == nbytes:
            self.compared += samples
            self._differs.append(_differ(last, now))
        self._last[group] = now

    @property
    def changed(self) -> bool:
        """Has any sampled element changed? Waits for the device."""
        return any(bool(found) for found in self._differs)

    @property
    def identical(self) -> bool:
        """Was there something to compare with, and did nothing change?"""
        return self.compared > 0 and not self.changed


def _differ(last: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """One bool, where the samples are."""
    return (last != now).any()


def _count(elements: int) -> int:
    """Elements sampled of a tensor of so many."""
    return min(ELEMENTS, elements)


def _table(sizes: Sequence[tuple[int, int]], device: torch.device) -> tuple[CudaTable, int, int]:
    """The table that samples contiguous tensors (bases in order) into one buffer (last base); samples, their bytes."""
    moves = []
    at = samples = 0
    for i, (n, width) in sorted(enumerate(sizes), key=lambda item: -item[1][1]):
        count = _count(n)
        move = make_move((i, len(sizes)), (count,), (n // max(count, 1),), (1,), 0, 0, width)
        if move is not None:
            moves.append(evolve(move, dest_at=at))
        at += count * width
        samples += count
    return CudaTable(moves, device), samples, at


def _sample(full: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Evenly spaced elements of contiguous tensors, widest first; as integers, so that a NaN equals itself."""
    views: list[torch.Tensor] = []
    at = 0
    for tensor in full:
        count, width = _count(tensor.numel()), tensor.element_size()
        views.append(out[at : at + count * width].view(INTEGERS[width]))
        at += count * width
    strided = [
        t.detach().view(INTEGERS[t.element_size()]).as_strided((_count(t.numel()),), (t.numel() // _count(t.numel()),))
        for t in full
    ]
    if views:
        torch._foreach_copy_(views, strided)
