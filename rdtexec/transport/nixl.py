"""`nixl`: one-sided READs of packed chunks, straight from NIXL, prepared once and reposted every sync.

A producer packs a chunk into serve slot `seq % K` of a ring that it registered once; the consumer reads it, as one
descriptor, into a slot of its receive pool, which it registered once. A transfer handle is made the first time a chunk
meets a receive slot and reposted from then on.

After an aborted transfer the target may still be overwritten until the agent is gone, so a poisoned consumer destroys
its agent before anything else and keeps the pool's memory for the life of the process.
"""

from __future__ import annotations

import base64
import contextlib
import os
import uuid
from typing import Any, ClassVar

import torch

from rdtexec.destination import Destination
from rdtexec.device import host_pages
from rdtexec.plans import TrainerPlan, WorkerPlan
from rdtexec.pool import ReceivePool
from rdtexec.schedule import Pull
from rdtexec.transport.base import ReadFailed
from rdtexec.transport.packed import PackedConsumer, RingProducer, ServeRings
from rdtplan.errors import TransferError

_POISONED: list[Any] = []
"""Memory that an aborted transfer may still write to; kept on purpose until the process ends."""


def _make_agent(name: str, device: torch.device, *, answers: bool) -> Any:
    """A NIXL agent. `answers`: others read from it, so a thread has to answer UCX; that thread never sleeps.

    One that only reads, into host memory, progresses inside its own calls, and a worker that serves requests keeps its
    core between syncs. On GPUs every agent has the thread: reading without it was not measured there.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    if device.type == "cuda":
        # On a machine of one GPU UCX sees no NVLink, takes CUDA IPC reads to be slow and goes through the host instead.
        os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise TransferError(
            f"transport nixl needs NIXL: {error}", fix="pip install 'rdtplan[nixl]'", code="RDT614"
        ) from None
    config = nixl_agent_config(enable_prog_thread=answers or device.type == "cuda", backends=["UCX"])
    try:
        return nixl_agent(f"{name}-{uuid.uuid4().hex[:8]}", config)
    except Exception as error:
        raise TransferError(f"NIXL agent {name} did not start: {error}", code="RDT614") from None


def _memory_type(memory: torch.Tensor) -> tuple[str, int]:
    return ("VRAM", memory.device.index or 0) if memory.is_cuda else ("DRAM", 0)


def _serve_memory(rank: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Flat uint8 memory of a serve ring; TransferError RDT611 with the bytes when it is not there."""
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device) if device.type == "cuda" else host_pages(nbytes)
    except (RuntimeError, MemoryError, OSError, ValueError) as error:
        raise TransferError(
            f"producer {rank}: a serve ring does not fit: {nbytes:,} bytes on {device}: {str(error)[:160]}",
            fix="compile with a smaller --max-chunk-mb, or lower num_rdt_buffers",
            code="RDT611",
        ) from None


def _register(agent: Any, memory: torch.Tensor, what: str) -> Any:
    try:
        return agent.register_memory([memory])
    except Exception as error:
        raise TransferError(
            f"NIXL cannot register {what} ({memory.numel():,} bytes on {memory.device}): {error}",
            fix="check the locked-memory limit (ulimit -l) and the UCX transports",
            code="RDT615",
        ) from None


class NixlProducer(RingProducer):
    """Serve rings in registered memory."""

    name: ClassVar[str] = "nixl"

    def __init__(self, device: torch.device) -> None:
        """`device` is where chunks are packed."""
        self._device = device

    def attach(self, plan: TrainerPlan, sharers: dict[int, tuple[int, ...]]) -> None:
        self._rank = plan.producer.rank
        self._agent = _make_agent(f"rdtexec-producer-{self._rank}", self._device, answers=True)
        self._registrations: list[Any] = []
        self._rings = ServeRings(plan, sharers, self._allocate)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        memory = _serve_memory(self._rank, nbytes, self._device)
        self._registrations.append(_register(self._agent, memory, f"a serve ring of producer {self._rank}"))
        return memory

    def welcome(self, consumer: int) -> dict[str, Any]:
        memory, slot_nbytes = self._rings.ring(consumer)
        kind, device = _memory_type(memory)
        return {
            "agent": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "address": memory.data_ptr(),
            "slot_nbytes": slot_nbytes,
            "memory": kind,
            "device": device,
        }

    def close(self) -> None:
        for registration in self._registrations:
            self._agent.deregister_memory(registration)
        self._rings.close()
        del self._agent


class NixlConsumer(PackedConsumer):
    """Reads packed chunks into the receive pool."""

    name: ClassVar[str] = "nixl"

    def attach(self, plan: WorkerPlan, destination: Destination, pool: ReceivePool | None) -> None:
        super().attach(plan, destination, pool)
        name = f"rdtexec-consumer-{plan.consumer.consumer_id}"
        self._agent = _make_agent(name, destination.device, answers=False)
        self._registration = _register(self._agent, self._pool.memory, "the receive pool")
        self._remotes: dict[int, tuple[str, dict[str, Any]]] = {}
        self._handles: dict[Pull, Any] = {}
        self._inflight: dict[Pull, tuple[int, Any]] = {}

    def connect(self, producer: int, welcome: dict[str, Any]) -> None:
        try:
            name = self._agent.add_remote_agent(base64.b64decode(welcome["agent"]))
        except Exception as error:
            raise TransferError(f"NIXL cannot reach producer {producer}: {error}", code="RDT616") from None
        self._remotes[producer] = (name.decode() if isinstance(name, bytes) else name, welcome)

    def begin_read(self, pull: Pull, producer: int, ready: dict[str, Any]) -> None:
        handle = self._handles.get(pull)
        try:
            if handle is None:
                handle = self._handles[pull] = self._prepare(pull, producer, int(ready["slot"]))
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
        local = self.slot(pull).data_ptr()
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

    def _failed(self, pull: Pull, producer: int, error: object) -> ReadFailed:
        return ReadFailed.of(
            producer,
            f"the READ of {self._plan.chunk_label(pull.chunk)} from producer {producer} failed: {error}",
            fix="look whether that producer still runs",
        )

    @property
    def inflight(self) -> int:
        return len(self._inflight)

    def close(self, *, poisoned: bool) -> None:
        if poisoned:
            _POISONED.append((self._pool.memory, self._inflight))
        for handle in self._handles.values():
            try:
                self._agent.release_xfer_handle(handle)
            except Exception:  # an aborted transfer cannot always be released; the agent's end releases it
                poisoned = True
        with contextlib.suppress(
            Exception
        ):  # what a dead peer or an aborted transfer still holds, the agent's end frees
            for name, _ in self._remotes.values():
                self._agent.remove_remote_agent(name)
            self._agent.deregister_memory(self._registration)
        self._handles.clear()
        self._copies.clear()
        del self._agent
