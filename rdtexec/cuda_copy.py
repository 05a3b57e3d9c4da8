"""Tables of moves on a GPU: built once, run with a list of base addresses on the current stream.

Running one costs a small upload of the addresses and, as a rule, one kernel launch, however many regions it copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from attrs import frozen

from rdtexec.moves import FIELDS, TILE_ELEMENTS, Move, Table, tabulate

PROGRAMS_PER_PROCESSOR = 16
WARPS = 4
"""Of 4, 8 and 16 warps and 4, 8 and 16 programs the fastest on H200."""


@frozen
class _Launch:
    """One table on the device."""

    unit: int
    element: int
    columns: int
    rows: torch.Tensor
    move_of_tile: torch.Tensor
    first_tile: torch.Tensor
    tiles: int


class CudaTable:
    """The moves of one chunk or group on `device`.

    The caller keeps the memory behind the bases alive, and its device able to address it, until the stream is past.
    """

    def __init__(self, moves: Sequence[Move], device: torch.device) -> None:
        """Uploads the table and compiles the kernel for it, so that the first `run` is as fast as the others."""
        self._moves, self.device = tuple(moves), device
        self._programs = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        self._launches: dict[int, list[_Launch]] = {}
        self._bases: tuple[tuple[int, ...], int, torch.Tensor] | None = None
        """The last bases, the stream they were uploaded on, and where they lie."""
        for launch in self._aligned_to(16):
            self._launch(launch, torch.zeros(1, dtype=torch.int64, device=device), tiles=0)

    def run(self, bases: Sequence[int]) -> None:
        """Copy everything on the current stream; returns before it is done."""
        if not self._moves:
            return
        together = 16
        for address in bases:
            together |= address
        aligned = together & -together
        uploaded = self._upload(tuple(bases))
        for launch in self._aligned_to(aligned):
            self._launch(launch, uploaded, tiles=launch.tiles)

    def _upload(self, bases: tuple[int, ...]) -> torch.Tensor:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        last = self._bases
        if last is None or last[:2] != (bases, stream):
            host = torch.tensor(bases, dtype=torch.int64, pin_memory=True)
            last = self._bases = (bases, stream, host.to(self.device, non_blocking=True))
        return last[2]

    def _aligned_to(self, aligned: int) -> list[_Launch]:
        found = self._launches.get(aligned)
        if found is None:
            found = self._launches[aligned] = [self._put(table) for table in tabulate(self._moves, aligned)]
        return found

    def _put(self, table: Table) -> _Launch:
        counts = torch.tensor(table.tiles, dtype=torch.int32)
        first = list(accumulate(table.tiles, initial=0))
        moves = torch.repeat_interleave(torch.arange(len(table.tiles), dtype=torch.int32), counts)
        return _Launch(
            table.unit,
            table.element,
            table.columns,
            torch.tensor(table.rows, dtype=torch.int64).view(-1, FIELDS).to(self.device),
            moves.to(self.device),
            torch.tensor(first[:-1], dtype=torch.int32).to(self.device),
            first[-1],
        )

    def _launch(self, launch: _Launch, bases: torch.Tensor, *, tiles: int) -> None:
        from rdtexec.copy_kernel import copy_tiles

        kernel: Any = copy_tiles
        with torch.cuda.device(self.device):
            kernel[(max(1, min(tiles, self._programs)),)](
                launch.rows,
                launch.move_of_tile,
                launch.first_tile,
                bases,
                tiles,
                ELEMENT=launch.element,
                PAIRS=launch.unit == 16,
                ROWS=TILE_ELEMENTS // launch.columns,
                COLUMNS=launch.columns,
                FIELDS=FIELDS,
                num_warps=WARPS,
            )


def on_gpu(tensors: Mapping[int, torch.Tensor]) -> list[int] | None:
    """Addresses of tensors that all lie on one GPU, in order; None when they do not. Cheap for very many of them."""
    devices = {t.device for t in tensors.values()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return None
    return [t.data_ptr() for t in tensors.values()]


def addressable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Can a kernel on `device` read and write this tensor: memory of that GPU, or page-locked host memory?"""
    return tensor.device == device if tensor.is_cuda else tensor.is_cpu and tensor.is_pinned()
