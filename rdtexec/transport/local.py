"""`local`: producer and consumer share a node, and the plan's regions are copied straight out of the producer's memory.

A producer keeps one anonymous shared-memory file (memfd) with `gather_lookahead + 1` slots, each as large as its
largest group; a gathered group lies in one slot, every name at a 64-byte boundary, so both ends compute the same
layout from the plan and a ready message carries a slot number alone. Consumers map the file once, read-only in spirit,
through `/proc`: it has no name, so nothing is left behind however the processes end. There is no packing and no
receive slot.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any, ClassVar

import torch

from rdtexec.destination import Destination
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


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


class LocalProducer(ProducerTransport):
    """The producer's shared arena."""

    name: ClassVar[str] = "local"
    share_slots: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        """The arena lies in host memory, whatever `device` the trainer computes on."""

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
        nbytes = slots * self._slot_nbytes
        self._fd = os.memfd_create(f"rdtexec-producer-{rank}")
        try:
            os.ftruncate(self._fd, nbytes)
            self._memory = _map(self._fd, nbytes)
        except (OSError, ValueError) as error:
            os.close(self._fd)
            raise TransferError(
                f"producer {rank} cannot share {nbytes:,} bytes ({slots} gather slots): {error}",
                fix="free memory on this node, or lower gather_lookahead",
                code="RDT611",
            ) from None

    def welcome(self, consumer: int) -> dict[str, Any]:
        return {"pid": os.getpid(), "fd": self._fd, "nbytes": len(self._memory), "slot_nbytes": self._slot_nbytes}

    def publish(self, group: int, tensors: dict[int, torch.Tensor]) -> None:
        slot = self._free.pop(0)
        self._slot_of[group] = slot
        offsets, _ = self._layouts[group]
        base = slot * self._slot_nbytes
        views = [_full_tensor(self._memory, base + at, self._plan.manifest, k) for k, at in offsets.items()]
        if views:
            torch._foreach_copy_(views, [tensors[k] for k in offsets])

    def serve(self, consumer: int, chunk: int, seq: int) -> dict[str, Any]:
        group = self._plan.consumers[consumer].program.chunks.group[chunk]
        return {"slot": self._slot_of[group]}

    def release(self, group: int) -> None:
        self._free.append(self._slot_of.pop(group))

    def reset(self) -> None:
        for group in list(self._slot_of):
            self.release(group)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalConsumer(ConsumerTransport):
    """Maps the arenas of the producers and copies out of them."""

    name: ClassVar[str] = "local"
    needs_slots: ClassVar[bool] = False
    frees_on_landing: ClassVar[bool] = False

    def attach(self, plan: WorkerPlan, destination: Destination, pool: ReceivePool | None) -> None:
        if destination.device.type != "cpu":
            raise TransferError(
                f"transport local moves CPU memory only, the model is on {destination.device}",
                fix="use transport nixl for this worker",
                code="RDT612",
            )
        self._plan, self._destination = plan, destination
        self._arenas: dict[int, tuple[torch.Tensor, int]] = {}
        self._landed: list[Pull] = []
        self._where: dict[int, tuple[int, int]] = {}
        self._cache: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def connect(self, producer: int, welcome: dict[str, Any]) -> None:
        path = f"/proc/{welcome['pid']}/fd/{welcome['fd']}"
        try:
            descriptor = os.open(path, os.O_RDWR)
            try:
                memory = _map(descriptor, welcome["nbytes"])
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise TransferError(
                f"cannot map the memory of producer {producer} ({path}, {welcome['nbytes']:,} bytes): {error}",
                fix="transport local needs both processes on one node, one PID namespace and one user; else use nixl",
                code="RDT613",
            ) from None
        self._arenas[producer] = (memory, welcome["slot_nbytes"])

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
        producer, slot = self._where[pull.chunk]

        def make() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            key = (pull.chunk, slot)
            if self._destination.moving:
                return self._views(pull.chunk, producer, slot)
            if key not in self._cache:
                self._cache[key] = self._views(pull.chunk, producer, slot)
            return self._cache[key]

        return make

    def _views(self, chunk: int, producer: int, slot: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        plan, program = self._plan, self._plan.consumer.program
        memory, slot_nbytes = self._arenas[producer]
        offsets, _ = group_layout(plan.manifest, plan.ownership, plan.groups[program.chunks.group[chunk]], producer)
        sources = {program.keys.source[k] for k in chunk_keys(program, chunk)}
        full = {k: _full_tensor(memory, slot * slot_nbytes + offsets[k], plan.manifest, k) for k in sources}
        return self._destination.pairs_from_sources(chunk, full)

    def close(self, *, poisoned: bool) -> None:
        self._cache.clear()
        self._arenas.clear()
