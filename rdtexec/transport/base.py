"""The transport interface: how the bytes of a chunk get from a producer's published tensors to a consumer.

Life cycle, the same for all implementations:

1. Producer: made with the trainer's plan when the first consumer comes that uses this transport. Consumer: made with
   the worker's plan and destination when the first producer chose this transport for the pair.
2. `welcome()` (producer) says what a consumer must know, once a connection; the consumer keeps it in `connect()`.
3. A sync. The producer calls `publish()` for each gathered group, `serve()` for each pull whose group is published
   (the returned fields go to the consumers), `release()` when a group's last free signal came. The consumer calls
   `begin_read()` when the producer says ready, `poll()` until the pull is in `landed`, and `copies()` in the scatter
   thread.
4. After a failed sync the producer calls `reset()` and can go on; the consumer is closed, and a new one connects.
5. `close()` on both sides. A consumer that still has `inflight` transfers is poisoned: the memory that they could
   write to stays parked for the life of the process.

`frees_on_landing` says when a consumer may signal that it is done with a group: when the bytes have landed in a slot
of its own, or, where it copies straight from the producer's memory, only after the copy. A group of which any chunk is
copied so is freed after its last copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from rdtexec.copies import Copy
from rdtexec.plans import TrainerPlan, WorkerPlan
from rdtexec.pool import ReceivePool
from rdtexec.schedule import Pull
from rdtplan.errors import TransferError

Copies = Callable[[], Copy]


class ReadFailed(TransferError):
    """A chunk could not be read from `producer`, a trainer rank."""

    code = "RDT616"
    producer: int

    @classmethod
    def of(cls, producer: int, message: str, fix: str) -> ReadFailed:
        """The error, with whom it was read from."""
        error = cls(message, fix=fix)
        error.producer = producer
        return error


class ConsumerTransport(ABC):
    """A worker's end."""

    name: ClassVar[str]
    needs_slots: ClassVar[bool]
    frees_on_landing: ClassVar[bool]

    @abstractmethod
    def attach(self, plan: WorkerPlan, destination: Any, pool: ReceivePool | None) -> None:
        """Bind to the plan and the memory, once, before anything else."""

    @abstractmethod
    def connect(self, producer: int, welcome: dict[str, Any]) -> None:
        """Keep what the producer said."""

    @abstractmethod
    def begin_read(self, pull: Pull, producer: int, ready: dict[str, Any]) -> None:
        """The producer has the chunk ready: start moving it. ReadFailed when it cannot be read."""

    @abstractmethod
    def poll(self) -> list[Pull]:
        """Pulls that have landed since the last call. ReadFailed when a transfer failed."""

    @property
    @abstractmethod
    def inflight(self) -> int:
        """Transfers under way: `poll` must be called again, and the pool cannot be given to anybody else."""

    @abstractmethod
    def copies(self, pull: Pull) -> Copies:
        """What gives the copy of a landed pull out of its slot or its producer's memory; called in the scatter thread.

        On a GPU the copy is enqueued on the current stream, and the scatter signals when an event says that it is done.
        """

    @abstractmethod
    def close(self, *, poisoned: bool) -> None:
        """Give everything back; `poisoned` when transfers or reads may still be under way."""


class ProducerTransport(ABC):
    """A trainer rank's end."""

    name: ClassVar[str]
    share_slots: ClassVar[bool]
    """Do consumers that execute the same chunks from the same producers read one packed slot?"""

    @abstractmethod
    def attach(self, plan: TrainerPlan, sharers: dict[int, tuple[int, ...]]) -> None:
        """Bind to the plan; `sharers[c]` are the consumers that may share serve slots with c, itself included."""

    @abstractmethod
    def welcome(self, consumer: int) -> dict[str, Any]:
        """Facts for the consumer. Memory that only this consumer and its sharers need is taken here."""

    @abstractmethod
    def publish(self, group: int, tensors: dict[int, torch.Tensor]) -> None:
        """A group was gathered; `tensors` by manifest index, contiguous, in the plan's dtype and shape.

        On a GPU the gather may still run on the caller's current stream.
        """

    @abstractmethod
    def serve(self, consumer: int, chunk: int, seq: int) -> dict[str, Any]:
        """Make a chunk readable and return what its readers must know."""

    @abstractmethod
    def release(self, group: int) -> None:
        """The group's memory may be reused."""

    @abstractmethod
    def reset(self) -> None:
        """A sync failed: forget every published group. Nobody reads them any more."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""
