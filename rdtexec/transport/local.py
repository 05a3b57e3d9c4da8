"""`local`: producer and consumer share a node, and the plan's regions are copied straight out of the producer's memory.

A producer keeps one *arena* with `gather_lookahead + 1` slots, each as large as its largest group; a gathered group
lies in one slot, every name at a 64-byte boundary, so both ends compute the same layout from the plan and a ready
message carries a slot number alone. Consumers map the arena once. There is no packing and no receive slot.

On CPU the arena is an anonymous shared-memory file (memfd), mapped through `/proc`: it has no name, so nothing is left
behind however the processes end. On a GPU it is one driver allocation, mapped by its CUDA IPC handle, on the same GPU
or on another that reaches it; publishing is one kernel launch on the caller's stream, behind the gather, and copying a
chunk is another on the scatter's. A ready message goes out when the publishing has completed on the device, and the
free signal that gives a slot back when the copy has.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from rdtexec.copies import Copy, ScatterMoves, TableCopy, ViewCopy
from rdtexec.cuda_copy import CudaTable, on_gpu
from rdtexec.cuda_ipc import MappedMemory, SharedMemory
from rdtexec.destination import Destination
from rdtexec.device import record_now, with_index
from rdtexec.moves import make_move
from rdtexec.plans import TrainerPlan, WorkerPlan, chunk_keys
from rdtexec.pool import ReceivePool
from rdtexec.schedule import Pull
from rdtexec.transport.base import ConsumerTransport, Copies, ProducerTransport
from rdtplan.errors import TransferError
from rdtplan.ir.manifest import Manifest
from rdtplan.ir.plan import GatherGroup
from rdtplan.ir.topology import Ownership

NAME_ALIGNMENT = 64


def node() -> str:
    """Processes with equal values can map each other's memory: one kernel, one PID namespace, one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.geteuid()}"


def group_layout(manifest: Manifest, ownership: Ownership, group: GatherGroup, rank: int) -> tuple[dict[int, int], int]:
    """(manifest index -> byte offset in a slot, bytes of the whole) of the names of `group` that `rank` owns."""
    offsets: dict[int, int] = {}
    end = 0
    for k in range(group.first, group.first + group.count):
        if rank in ownership.owners(k):
            offsets[k] = end
            end += -(-manifest.nbytes(k) // NAME_ALIGNMENT) * NAME_ALIGNMENT
    return offsets, end


def _full_tensor(memory: torch.Tensor, at: int, manifest: Manifest, k: int) -> torch.Tensor:
    dtype = getattr(torch, manifest.dtype(k))
    return memory[at : at + manifest.nbytes(k)].view(dtype).view(manifest.shape(k))


class Arena(Protocol):
    """A producer's memory, or a consumer's mapping of it."""

    memory: torch.Tensor
    """Flat uint8."""

    def close(self) -> None:
        """Give it back."""


class _HostArena:
    """A memfd of this process."""

    def __init__(self, nbytes: int, name: str) -> None:
        self._fd = os.memfd_create(name)
        try:
            os.ftruncate(self._fd, nbytes)
            self.memory = _map(self._fd, nbytes)
        except BaseException:
            self.close()
            raise
        self.facts: dict[str, Any] = {"pid": os.getpid(), "fd": self._fd, "nbytes": nbytes}

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _MappedHostArena:
    """Another process' memfd."""

    def __init__(self, facts: dict[str, Any]) -> None:
        descriptor = os.open(f"/proc/{facts['pid']}/fd/{facts['fd']}", os.O_RDWR)
        try:
            self.memory = _map(descriptor, facts["nbytes"])
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """It is unmapped with its last view."""


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


class LocalProducer(ProducerTransport):
    """The producer's shared arena."""

    name: ClassVar[str] = "local"
    share_slots: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        """The arena lies on `device`: consumers on a GPU copy out of a GPU's, those on the CPU out of the host's."""
        self._device = with_index(device)

    def attach(self, plan: TrainerPlan, sharers: dict[int, tuple[int, ...]]) -> None:
        self._plan = plan
        rank = plan.producer.rank
        self._layouts = {
            g: group_layout(plan.manifest, plan.ownership, plan.groups[g], rank) for g in plan.producer.groups
        }
        self._slot_nbytes = max((n for _, n in self._layouts.values()), default=1) or 1
        slots = plan.settings.gather_lookahead + 1
        self._free = list(range(slots))
        self._slot_of: dict[int, int] = {}
        self._published: dict[int, Any] = {}
        """Event behind the publishing of each group in the arena; None when that is known to be done."""
        self._tables: dict[int, CudaTable] = {}
        nbytes = slots * self._slot_nbytes
        try:
            if self._device.type == "cuda":
                self._arena: SharedMemory | _HostArena = SharedMemory(nbytes, self._device)
            else:
                self._arena = _HostArena(nbytes, f"rdtexec-producer-{rank}")
        except (OSError, ValueError, RuntimeError) as error:
            raise TransferError(
                f"producer {rank} cannot share {nbytes:,} bytes on {self._device} ({slots} gather slots): {error}",
                fix="free memory there, or lower gather_lookahead",
                code="RDT611",
            ) from None
        if self._device.type == "cuda":
            self._tables = {g: self._table(offsets) for g, (offsets, _) in self._layouts.items()}

    def _table(self, offsets: dict[int, int]) -> CudaTable:
        """Whole tensors, bases 0 and up in the order of `offsets`, into a slot, which is the last base."""
        sizes = [self._plan.manifest.nbytes(k) for k in offsets]
        ends = zip(sizes, offsets.values(), strict=True)
        moves = [make_move((i, len(sizes)), (n,), (1,), (1,), 0, at, 1) for i, (n, at) in enumerate(ends)]
        return CudaTable([m for m in moves if m is not None], self._device)

    def welcome(self, consumer: int) -> dict[str, Any]:
        return {"device": self._device.type, "slot_nbytes": self._slot_nbytes, **self._arena.facts}

    def publish(self, group: int, tensors: dict[int, torch.Tensor]) -> None:
        slot = self._free.pop(0)
        self._slot_of[group] = slot
        offsets, _ = self._layouts[group]
        base = slot * self._slot_nbytes
        memory = self._arena.memory
        addresses = on_gpu(tensors) if group in self._tables else None
        if addresses and next(iter(tensors.values())).device == self._device:
            self._tables[group].run([*addresses, memory.data_ptr() + base])
        else:
            views = [_full_tensor(memory, base + at, self._plan.manifest, k) for k, at in offsets.items()]
            if views:
                torch._foreach_copy_(views, [tensors[k] for k in offsets])
        self._published[group] = record_now(self._device)

    def serve(self, consumer: int, chunk: int, seq: int) -> dict[str, Any]:
        group = self._plan.consumers[consumer].program.chunks.group[chunk]
        event = self._published[group]
        if event is not None:
            event.synchronize()
            self._published[group] = None
        return {"slot": self._slot_of[group]}

    def release(self, group: int) -> None:
        self._free.append(self._slot_of.pop(group))
        self._published.pop(group, None)

    def reset(self) -> None:
        for group in list(self._slot_of):
            self.release(group)

    def close(self) -> None:
        self._tables.clear()
        self._arena.close()


class LocalConsumer(ConsumerTransport):
    """Maps the arenas of the producers and copies out of them."""

    name: ClassVar[str] = "local"
    needs_slots: ClassVar[bool] = False
    frees_on_landing: ClassVar[bool] = False

    def attach(self, plan: WorkerPlan, destination: Destination, pool: ReceivePool | None) -> None:
        self._plan, self._destination = plan, destination
        self._arenas: dict[int, tuple[Arena, int]] = {}
        self._landed: list[Pull] = []
        self._where: dict[int, tuple[int, int]] = {}
        self._cache: dict[tuple[int, int], ViewCopy] = {}
        self._tables: dict[int, tuple[CudaTable, ScatterMoves]] = {}
        """By chunk, on a GPU."""

    def connect(self, producer: int, welcome: dict[str, Any]) -> None:
        device = self._destination.device
        if welcome["device"] != device.type:
            raise TransferError(
                f"transport local: producer {producer} shares {welcome['device']} memory, the model is on {device}",
                fix="use transport nixl for this pair, or auto",
                code="RDT612",
            )
        try:
            arena: Arena = MappedMemory(welcome, device) if device.type == "cuda" else _MappedHostArena(welcome)
        except (OSError, ValueError, RuntimeError) as error:
            raise TransferError(
                f"cannot map {welcome['nbytes']:,} bytes of producer {producer} (process {welcome['pid']}) for "
                f"{device}: {error}",
                fix="transport local needs both processes on one node, one PID namespace and one user, and GPUs that "
                "reach each other; else use nixl",
                code="RDT613",
            ) from None
        self._arenas[producer] = (arena, welcome["slot_nbytes"])
        if device.type == "cuda":
            for chunk, rank in enumerate(self._plan.consumer.routing.producer):
                if rank == producer:
                    moves = self._destination.moves(chunk, self._layout(chunk, producer))
                    self._tables[chunk] = (CudaTable(moves.moves, device), moves)

    def _layout(self, chunk: int, producer: int) -> dict[int, int]:
        plan = self._plan
        group = plan.groups[plan.consumer.program.chunks.group[chunk]]
        return group_layout(plan.manifest, plan.ownership, group, producer)[0]

    def begin_read(self, pull: Pull, producer: int, ready: dict[str, Any]) -> None:
        self._where[pull.chunk] = (producer, int(ready["slot"]))
        self._landed.append(pull)

    def poll(self) -> list[Pull]:
        found, self._landed = self._landed, []
        return found

    @property
    def inflight(self) -> int:
        return len(self._landed)

    def copies(self, pull: Pull) -> Copies:
        chunk = pull.chunk
        producer, slot = self._where[chunk]

        def make() -> Copy:
            if chunk in self._tables:
                return self._by_table(chunk, producer, slot)
            if self._destination.moving:
                return ViewCopy(*self._views(chunk, producer, slot))
            if (chunk, slot) not in self._cache:
                self._cache[chunk, slot] = ViewCopy(*self._views(chunk, producer, slot))
            return self._cache[chunk, slot]

        return make

    def _by_table(self, chunk: int, producer: int, slot: int) -> TableCopy:
        table, moves = self._tables[chunk]
        arena, slot_nbytes = self._arenas[producer]
        tensors = self._destination.tensors
        bases = (arena.memory.data_ptr() + slot * slot_nbytes, *(tensors[row].data_ptr() for row in moves.rows))
        rest = moves.rest
        return TableCopy(
            table,
            bases,
            lambda: self._views(chunk, producer, slot, rest) if rest else ([], []),
            lambda: self._destination.written(chunk),
        )

    def _views(
        self, chunk: int, producer: int, slot: int, scatters: Sequence[int] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        plan, program = self._plan, self._plan.consumer.program
        arena, slot_nbytes = self._arenas[producer]
        offsets = self._layout(chunk, producer)
        sources = {program.keys.source[k] for k in chunk_keys(program, chunk)}
        at = slot * slot_nbytes
        full = {k: _full_tensor(arena.memory, at + offsets[k], plan.manifest, k) for k in sources}
        return self._destination.pairs_from_sources(chunk, full, scatters)

    def close(self, *, poisoned: bool) -> None:
        self._cache.clear()
        self._tables.clear()
        for arena, _ in self._arenas.values():
            if not poisoned:  # else a copy may still read it
                arena.close()
        self._arenas.clear()
