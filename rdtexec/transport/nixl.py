"""`nixl`: one-sided READs of packed chunks, straight from NIXL, prepared once and reposted every sync.

A producer packs a chunk into serve slot `seq % K` of a ring that it registered once; the consumer reads it, as one
descriptor, into a slot of its receive pool, which it registered once. A transfer handle is made the first time a chunk
meets a receive slot and reposted from then on.

After an aborted transfer the target may still be overwritten until the agent is gone, so a poisoned consumer destroys
its agent before anything else and keeps the pool's memory for the life of the process.
"""

from __future__ import annotations

import base64
import os
import uuid
from typing import Any, ClassVar

import torch

from rdtexec.destination import Destination, packed_slice, strided, typed
from rdtexec.plans import TrainerPlan, WorkerPlan, chunk_keys
from rdtexec.pool import ReceivePool
from rdtexec.schedule import Pull
from rdtexec.transport.base import ConsumerTransport, Copies, ProducerTransport
from rdtplan.errors import TransferError
from rdtplan.ir.regions import Region

PAGE = 4096
_POISONED: list[Any] = []
"""Memory that an aborted transfer may still write to; kept on purpose until the process ends."""


def _make_agent(name: str) -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise TransferError(
            f"transport nixl needs NIXL: {error}", fix="pip install 'rdtplan[nixl]'", code="RDT614"
        ) from None
    try:
        return nixl_agent(f"{name}-{uuid.uuid4().hex[:8]}", nixl_agent_config(backends=["UCX"]))
    except Exception as error:
        raise TransferError(f"NIXL agent {name} did not start: {error}", code="RDT614") from None


def _memory_type(memory: torch.Tensor) -> tuple[str, int]:
    return ("VRAM", memory.device.index or 0) if memory.is_cuda else ("DRAM", 0)


def _register(agent: Any, memory: torch.Tensor, what: str) -> Any:
    try:
        return agent.register_memory([memory])
    except Exception as error:
        raise TransferError(
            f"NIXL cannot register {what} ({memory.numel():,} bytes on {memory.device}): {error}",
            fix="check the locked-memory limit (ulimit -l) and the UCX transports",
            code="RDT615",
        ) from None


class NixlProducer(ProducerTransport):
    """Serve rings: K slots for every set of sharers, each as large as their largest chunk."""

    name: ClassVar[str] = "nixl"
    share_slots: ClassVar[bool] = True

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def attach(self, plan: TrainerPlan, sharers: dict[int, tuple[int, ...]]) -> None:
        self._plan = plan
        rank = plan.producer.rank
        self._k = plan.settings.num_rdt_buffers
        self._tensors: dict[int, torch.Tensor] = {}
        self._names_of: dict[int, list[int]] = {}
        self._rings: dict[tuple[int, ...], tuple[int, int]] = {}
        at = 0
        for serving in plan.producer.servings:
            members = sharers[serving.consumer_id]
            if members not in self._rings:
                slot = -(-max(serving.slot_nbytes, 1) // PAGE) * PAGE
                self._rings[members] = (at, slot)
                at += slot * self._k
        self._sharers = sharers
        try:
            self._memory = torch.zeros(max(at, PAGE), dtype=torch.uint8, device=self._device)
        except (RuntimeError, MemoryError) as error:
            raise TransferError(
                f"producer {rank}: the serve rings do not fit: {at:,} bytes on {self._device}: {str(error)[:160]}",
                fix="compile with a smaller --max-chunk-mb, or lower num_rdt_buffers",
                code="RDT611",
            ) from None
        self._agent = _make_agent(f"rdtexec-producer-{rank}")
        self._registration = _register(self._agent, self._memory, "the serve rings")
        self._views: dict[tuple[tuple[int, ...], int], tuple[tuple[int, ...], list[Any], list[Any]]] = {}

    def welcome(self, consumer: int, hello: dict[str, Any]) -> dict[str, Any]:
        ring, slot = self._rings.get(self._sharers.get(consumer, ()), (0, 0))
        kind, device = _memory_type(self._memory)
        return {
            "agent": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "address": self._memory.data_ptr() + ring,
            "slot_nbytes": slot,
            "memory": kind,
            "device": device,
        }

    def publish(self, group: int, tensors: dict[int, torch.Tensor]) -> None:
        self._tensors.update(tensors)
        self._names_of[group] = list(tensors)

    def serve(self, consumer: int, chunk: int, seq: int) -> dict[str, Any]:
        members = self._sharers[consumer]
        ring, slot_nbytes = self._rings[members]
        program = self._plan.consumers[consumer].program
        keys = chunk_keys(program, chunk)
        addresses = tuple(self._tensors[program.keys.source[k]].data_ptr() for k in keys)
        cached = self._views.get((members, chunk))
        if cached is None or cached[0] != addresses:
            base = ring + (seq % self._k) * slot_nbytes
            packed = self._memory[base : base + slot_nbytes]
            dests: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            for k in keys:
                region = program.regions[program.keys.region[k]]
                full = typed(self._tensors[program.keys.source[k]], program.dtype_table[program.keys.dtype[k]])
                sources.append(strided(full, Region(region.shape, region.stride, region.offset)))
                dests.append(packed_slice(program, k, packed).view(region.shape))
            cached = self._views[members, chunk] = (addresses, dests, sources)
        if cached[1]:
            torch._foreach_copy_(cached[1], cached[2])
        if self._memory.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
        return {"slot": seq % self._k}

    def release(self, group: int) -> None:
        for k in self._names_of.pop(group):
            del self._tensors[k]

    def close(self) -> None:
        self._views.clear()
        self._tensors.clear()
        self._agent.deregister_memory(self._registration)
        del self._agent


class NixlConsumer(ConsumerTransport):
    """Reads packed chunks into the receive pool."""

    name: ClassVar[str] = "nixl"
    needs_slots: ClassVar[bool] = True
    frees_on_landing: ClassVar[bool] = True

    def attach(self, plan: WorkerPlan, destination: Destination, pool: ReceivePool | None) -> None:
        assert pool is not None
        self._plan, self._destination, self._pool = plan, destination, pool
        self._agent = _make_agent(f"rdtexec-consumer-{plan.consumer.consumer_id}")
        self._registration = _register(self._agent, pool.memory, "the receive pool")
        self._remotes: dict[int, tuple[str, dict[str, Any]]] = {}
        self._handles: dict[tuple[int, int, int], Any] = {}
        self._copies: dict[tuple[int, int, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._inflight: dict[Pull, tuple[int, Any]] = {}

    def connect(self, producer: int, welcome: dict[str, Any]) -> None:
        try:
            name = self._agent.add_remote_agent(base64.b64decode(welcome["agent"]))
        except Exception as error:
            raise TransferError(f"NIXL cannot reach producer {producer}: {error}", code="RDT616") from None
        self._remotes[producer] = (name.decode() if isinstance(name, bytes) else name, welcome)

    def begin_read(self, pull: Pull, producer: int, ready: dict[str, Any]) -> None:
        key = (pull.chunk, pull.lane, pull.slot)
        handle = self._handles.get(key)
        try:
            if handle is None:
                handle = self._handles[key] = self._prepare(pull, producer, int(ready["slot"]))
            state = self._agent.transfer(handle)
        except TransferError:
            raise
        except Exception as error:
            raise self._failed(pull, producer, error) from None
        if state == "ERR":
            raise self._failed(pull, producer, "state ERR")
        self._inflight[pull] = (producer, handle)

    def _prepare(self, pull: Pull, producer: int, serve_slot: int) -> Any:
        name, facts = self._remotes[producer]
        nbytes = self._plan.consumer.program.chunks.nbytes[pull.chunk]
        if nbytes > facts["slot_nbytes"]:
            raise TransferError(
                f"{self._plan.chunk_label(pull.chunk)} does not fit the serve slot of producer {producer}: "
                f"{facts['slot_nbytes']:,} bytes",
                fix="both ends must run the same plan",
                code="RDT603",
            )
        kind, device = _memory_type(self._pool.memory)
        local = self._pool.slots[pull.lane][pull.slot].buffer.data_ptr()
        remote = facts["address"] + serve_slot * facts["slot_nbytes"]
        return self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs([(local, nbytes, device)], kind),
            self._agent.get_xfer_descs([(remote, nbytes, facts["device"])], facts["memory"]),
            name,
        )

    def poll(self) -> list[Pull]:
        landed: list[Pull] = []
        for pull, (producer, handle) in list(self._inflight.items()):
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception as error:
                raise self._failed(pull, producer, error) from None
            if state == "ERR":
                raise self._failed(pull, producer, "state ERR")
            if state == "DONE":
                del self._inflight[pull]
                landed.append(pull)
        return landed

    def _failed(self, pull: Pull, producer: int, error: object) -> TransferError:
        return TransferError(
            f"the READ of {self._plan.chunk_label(pull.chunk)} from producer {producer} failed: {error}",
            fix="look whether that producer still runs",
            code="RDT616",
        )

    @property
    def reading(self) -> bool:
        return bool(self._inflight)

    def copies(self, pull: Pull) -> Copies:
        def make() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            key = (pull.chunk, pull.lane, pull.slot)
            packed = self._pool.slots[pull.lane][pull.slot].buffer
            if self._destination.moving:
                return self._destination.pairs_from_packed(pull.chunk, packed)
            if key not in self._copies:
                self._copies[key] = self._destination.pairs_from_packed(pull.chunk, packed)
            return self._copies[key]

        return make

    def close(self, *, poisoned: bool) -> None:
        if poisoned:
            _POISONED.append((self._pool.memory, self._inflight))
        for handle in self._handles.values():
            try:
                self._agent.release_xfer_handle(handle)
            except Exception:  # an aborted transfer cannot always be released; the agent's end releases it
                poisoned = True
        for name, _ in self._remotes.values():
            self._agent.remove_remote_agent(name)
        self._agent.deregister_memory(self._registration)
        self._handles.clear()
        self._copies.clear()
        del self._agent
