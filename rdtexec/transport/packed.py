"""Packed chunks, for transports that move them as one piece: the producer's serve rings and the consumer's way out.

A producer packs a chunk into slot `seq % K` of a ring that its readers share; a consumer receives it in a slot of its
receive pool and scatters from there. A consumer asks for chunk `seq + K` only after `seq` has landed, and a shared slot
is packed when every live sharer has asked for it, so no slot is overwritten while somebody reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rdtexec.destination import Destination, packed_slice, strided, typed
from rdtexec.plans import TrainerPlan, WorkerPlan, chunk_keys
from rdtexec.pool import ReceivePool
from rdtexec.schedule import Pull
from rdtexec.transport.base import ConsumerTransport, Copies
from rdtplan.ir.manifest import Ints
from rdtplan.ir.regions import Region

PAGE = 4096


class ServeRings:
    """Published tensors, and K slots for every set of sharers, each as large as their largest chunk."""

    def __init__(
        self, plan: TrainerPlan, sharers: dict[int, tuple[int, ...]], allocate: Callable[[int], torch.Tensor]
    ) -> None:
        """`allocate(nbytes)` gives the flat uint8 memory of a ring when the first of its readers connects."""
        self._plan, self._sharers, self._allocate = plan, sharers, allocate
        self._k = plan.settings.num_rdt_buffers
        largest = {s.consumer_id: s.slot_nbytes for s in plan.producer.servings}
        self._slot_nbytes = {
            members: -(-max(*(largest.get(c, 0) for c in members), 1) // PAGE) * PAGE for members in sharers.values()
        }
        self._rings: dict[tuple[int, ...], torch.Tensor] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._names_of: dict[int, list[int]] = {}
        self._gathered: dict[int, Any] = {}
        self._views: dict[tuple[tuple[int, ...], int], tuple[Ints, list[torch.Tensor], list[torch.Tensor]]] = {}

    def ring(self, consumer: int) -> tuple[torch.Tensor, int]:
        """(memory, bytes of one slot) of the ring that `consumer` reads from."""
        members = self._sharers[consumer]
        if members not in self._rings:
            self._rings[members] = self._allocate(self._k * self._slot_nbytes[members])
        return self._rings[members], self._slot_nbytes[members]

    def publish(self, group: int, tensors: dict[int, torch.Tensor]) -> None:
        """Keep a gathered group until it is released; its gather may still run on the caller's CUDA stream."""
        on_gpu = next((t.device for t in tensors.values() if t.is_cuda), None)
        if on_gpu is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(on_gpu))
            self._gathered[group] = event
        self._tensors.update(tensors)
        self._names_of[group] = list(tensors)

    def pack(self, consumer: int, chunk: int, seq: int) -> int:
        """Pack one chunk, complete when this returns; the slot it lies in."""
        memory, slot_nbytes = self.ring(consumer)
        slot = seq % self._k
        program = self._plan.consumers[consumer].program
        keys = chunk_keys(program, chunk)
        addresses = tuple(self._tensors[program.keys.source[k]].data_ptr() for k in keys)
        cached = self._views.get((self._sharers[consumer], chunk))
        if cached is None or cached[0] != addresses:
            packed = memory[slot * slot_nbytes : (slot + 1) * slot_nbytes]
            dests: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            for k in keys:
                region = program.regions[program.keys.region[k]]
                full = typed(self._tensors[program.keys.source[k]], program.dtype_table[program.keys.dtype[k]])
                sources.append(strided(full, Region(region.shape, region.stride, region.offset)))
                dests.append(packed_slice(program, k, packed).view(region.shape))
            cached = self._views[self._sharers[consumer], chunk] = (addresses, dests, sources)
        event = self._gathered.get(program.chunks.group[chunk])
        if event is not None:
            event.synchronize()
        if cached[1]:
            torch._foreach_copy_(cached[1], cached[2])
        for device in {t.device for t in (*cached[1][:1], *cached[2][:1]) if t.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return slot

    def release(self, group: int) -> None:
        for k in self._names_of.pop(group):
            del self._tensors[k]
        self._gathered.pop(group, None)

    def reset(self) -> None:
        for group in list(self._names_of):
            self.release(group)

    def close(self) -> None:
        self.reset()
        self._views.clear()
        self._rings.clear()


class PackedConsumer(ConsumerTransport):
    """The half of a consumer's transport that is the same for all that fill receive slots."""

    needs_slots = True
    frees_on_landing = True

    def attach(self, plan: WorkerPlan, destination: Destination, pool: ReceivePool | None) -> None:
        assert pool is not None
        self._plan, self._destination, self._pool = plan, destination, pool
        self._copies: dict[Pull, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def slot(self, pull: Pull) -> torch.Tensor:
        """The receive slot of a pull, exactly as long as its chunk."""
        return self._pool.slots[pull.lane][pull.slot].buffer[: self._plan.consumer.program.chunks.nbytes[pull.chunk]]

    def copies(self, pull: Pull) -> Copies:
        def make() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            packed = self._pool.slots[pull.lane][pull.slot].buffer
            if self._destination.moving:
                return self._destination.pairs_from_packed(pull.chunk, packed)
            if pull not in self._copies:
                self._copies[pull] = self._destination.pairs_from_packed(pull.chunk, packed)
            return self._copies[pull]

        return make
