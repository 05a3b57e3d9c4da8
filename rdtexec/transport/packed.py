"""Packed chunks, for transports that move them as one piece: the producer's serve rings and the consumer's way out.

A producer packs a chunk into slot `seq % K` of a ring that its readers share; a consumer receives it in a slot of its
receive pool and scatters from there. A consumer asks for chunk `seq + K` only after `seq` has landed, and a shared slot
is packed when every live sharer has asked for it, so no slot is overwritten while somebody reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from attrs import evolve

from rdtexec.copies import Copy, ScatterMoves, TableCopy, ViewCopy
from rdtexec.cuda_copy import CudaTable, addressable
from rdtexec.destination import Destination, packed_slice, strided, typed
from rdtexec.device import make_lane, page_lock_memory
from rdtexec.moves import Move, make_move
from rdtexec.plans import TrainerPlan, WorkerPlan, chunk_keys
from rdtexec.pool import ReceivePool
from rdtexec.schedule import Pull
from rdtexec.transport.base import ConsumerTransport, Copies, ProducerTransport
from rdtplan.errors import TransferError
from rdtplan.ir.dtypes import itemsize
from rdtplan.ir.manifest import Ints
from rdtplan.ir.plan import Program
from rdtplan.ir.regions import Region, contiguous_stride

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
        self._places: dict[tuple[tuple[int, ...], int], tuple[list[tuple[int, str, Region]], list[torch.Tensor]]] = {}
        """Where torch packs, by sharers and chunk: name, element type and region of every slice, and its place."""
        self._tables: dict[tuple[tuple[int, ...], int], tuple[CudaTable, Ints]] = {}
        """On a GPU, by sharers and chunk: the table, and the source names that are its bases, before the slot."""
        self._lane: Any = None
        """The control thread's stream, when there is a GPU."""

    def ring(self, consumer: int) -> tuple[torch.Tensor, int]:
        """(memory, bytes of one slot) of the ring that `consumer` reads from."""
        members = self._sharers[consumer]
        if members not in self._rings:
            nbytes = self._k * self._slot_nbytes[members]
            memory = self._allocate(nbytes)
            using_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
            if memory.is_cpu and using_gpu and not memory.is_pinned():  # UCX locks what it registers, where it can
                _page_lock(memory, self._plan.producer.rank)  # this trainer's GPU packs straight into it
            self._rings[members] = memory
            if memory.is_cuda:  # so that the first sync compiles no kernel
                for serving in self._plan.producer.servings:
                    if serving.consumer_id == consumer:
                        for chunk in serving.chunks:
                            self._table(consumer, chunk, memory.device)
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
        named = [self._tensors[program.keys.source[k]] for k in chunk_keys(program, chunk)]
        gpu = next((t.device for t in named if t.is_cuda), None)
        if gpu is None and not memory.is_cuda:
            self._by_views(consumer, chunk, memory[slot * slot_nbytes :][:slot_nbytes]).run()
            return slot
        device = gpu or memory.device
        self._lane = self._lane or make_lane(device)
        self._lane.after(self._gathered.get(program.chunks.group[chunk]))
        with self._lane.enter():
            if all(addressable(t, device) for t in (memory, *named)):
                table, sources = self._table(consumer, chunk, device)
                table.run([*(self._tensors[k].data_ptr() for k in sources), memory.data_ptr() + slot * slot_nbytes])
            else:
                self._by_views(consumer, chunk, memory[slot * slot_nbytes :][:slot_nbytes]).run()
        self._lane.record().synchronize()
        return slot

    def _by_views(self, consumer: int, chunk: int, packed: torch.Tensor) -> ViewCopy:
        """The places of the slices are kept. Views of their sources are not: they would keep the group in memory."""
        program = self._plan.consumers[consumer].program
        places = self._places.get((self._sharers[consumer], chunk))
        if places is None:
            reads: list[tuple[int, str, Region]] = []
            dests: list[torch.Tensor] = []
            for k in chunk_keys(program, chunk):
                region = program.regions[program.keys.region[k]]
                reads.append((program.keys.source[k], program.dtype_table[program.keys.dtype[k]], region))
                dests.append(packed_slice(program, k, packed).view(region.shape))
            places = self._places[self._sharers[consumer], chunk] = (reads, dests)
        reads, dests = places
        return ViewCopy(dests, [strided(typed(self._tensors[k], dtype), region) for k, dtype, region in reads])

    def _table(self, consumer: int, chunk: int, device: torch.device) -> tuple[CudaTable, Ints]:
        found = self._tables.get((self._sharers[consumer], chunk))
        if found is None:
            program = self._plan.consumers[consumer].program
            keys = chunk_keys(program, chunk)
            sources = tuple(dict.fromkeys(program.keys.source[k] for k in keys))
            base = {k: i for i, k in enumerate(sources)}
            moves = [
                move for k in keys for move in pack_moves(program, k, (base[program.keys.source[k]], len(sources)))
            ]
            found = self._tables[self._sharers[consumer], chunk] = (CudaTable(moves, device), sources)
        return found

    def release(self, group: int) -> None:
        for k in self._names_of.pop(group):
            del self._tensors[k]
        self._gathered.pop(group, None)

    def reset(self) -> None:
        for group in list(self._names_of):
            self.release(group)

    def close(self) -> None:
        self.reset()
        self._places.clear()
        self._tables.clear()
        self._rings.clear()


def pack_moves(program: Program, key: int, bases: tuple[int, int]) -> list[Move]:
    """One slice out of its full tensor into its place in the packed chunk."""
    size = itemsize(program.dtype_table[program.keys.dtype[key]])
    return dense_moves(bases, program.regions[program.keys.region[key]], program.keys.offset[key], size)


def dense_moves(bases: tuple[int, int], region: Region, at: int, size: int) -> list[Move]:
    """A region, of elements of `size` bytes, written densely from byte `at` on; in halves where one move cannot do it.

    >>> [m.shape for m in dense_moves((0, 1), Region((2, 1 << 30), (4 << 30, 2), 0), 0, 2)]
    [(536870912,), (536870912,), (536870912,), (536870912,)]
    """
    found: list[Move] = []

    def add(shape: Ints, offset: int, at: int) -> None:
        move = make_move(bases, shape, region.stride, contiguous_stride(shape), offset, 0, size)
        if move is not None:
            found.append(evolve(move, dest_at=at))
        elif prod(shape):
            cut = next(d for d, n in enumerate(shape) if n > 1)
            half = shape[cut] // 2
            before, behind = shape[:cut], shape[cut + 1 :]
            add((*before, half, *behind), offset, at)
            offset, at = offset + half * region.stride[cut], at + half * prod(behind) * size
            add((*before, shape[cut] - half, *behind), offset, at)

    add(region.shape, region.offset, at)
    return found


def _page_lock(memory: torch.Tensor, rank: int) -> None:
    try:
        page_lock_memory(memory)
    except RuntimeError as error:
        raise TransferError(
            f"producer {rank}: a serve ring of {memory.numel():,} bytes cannot be page-locked: {error}",
            fix="raise the locked-memory limit (ulimit -l), or stage on the GPU",
            code="RDT611",
        ) from None


class RingProducer(ProducerTransport):
    """The half of a producer's transport that is the same for all that serve from rings; `attach` makes `_rings`."""

    share_slots = True
    _rings: ServeRings

    def publish(self, group: int, tensors: dict[int, torch.Tensor]) -> None:
        self._rings.publish(group, tensors)

    def serve(self, consumer: int, chunk: int, seq: int) -> dict[str, Any]:
        return {"slot": self._rings.pack(consumer, chunk, seq)}

    def release(self, group: int) -> None:
        self._rings.release(group)

    def reset(self) -> None:
        self._rings.reset()


class PackedConsumer(ConsumerTransport):
    """The half of a consumer's transport that is the same for all that fill receive slots."""

    needs_slots = True
    frees_on_landing = True

    def attach(self, plan: WorkerPlan, destination: Destination, pool: ReceivePool | None) -> None:
        assert pool is not None
        self._plan, self._destination, self._pool = plan, destination, pool
        self._copies: dict[Pull, ViewCopy] = {}
        self._tables: dict[int, tuple[CudaTable, ScatterMoves]] = {}
        """By chunk, on a GPU."""
        if destination.device.type == "cuda" and addressable(pool.memory, destination.device):
            for chunk in range(len(plan.consumer.program.chunks)):
                moves = destination.moves(chunk, None)
                self._tables[chunk] = (CudaTable(moves.moves, destination.device), moves)

    def slot(self, pull: Pull) -> torch.Tensor:
        """The receive slot of a pull, exactly as long as its chunk."""
        return self._pool.slots[pull.lane][pull.slot].buffer[: self._plan.consumer.program.chunks.nbytes[pull.chunk]]

    def copies(self, pull: Pull) -> Copies:
        def make() -> Copy:
            packed = self._pool.slots[pull.lane][pull.slot].buffer
            if pull.chunk in self._tables:
                return self._by_table(pull.chunk, packed)
            if self._destination.moving:
                return ViewCopy(*self._destination.pairs_from_packed(pull.chunk, packed))
            if pull not in self._copies:
                self._copies[pull] = ViewCopy(*self._destination.pairs_from_packed(pull.chunk, packed))
            return self._copies[pull]

        return make

    def _by_table(self, chunk: int, packed: torch.Tensor) -> TableCopy:
        table, moves = self._tables[chunk]
        destination, rest = self._destination, moves.rest
        return TableCopy(
            table,
            (packed.data_ptr(), *(destination.tensors[row].data_ptr() for row in moves.rows)),
            lambda: destination.pairs_from_packed(chunk, packed, rest) if rest else ([], []),
            lambda: destination.written(chunk),
        )
