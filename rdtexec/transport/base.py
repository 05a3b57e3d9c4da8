"""The transport interface: how the bytes of a chunk get from a producer's published tensors to a consumer.

Life cycle, the same for all implementations:

1. Producer: made once with the trainer's plan. Consumer: made once with the worker's plan and destination.
2. `hello()` (consumer) and `welcome()` (producer) exchange what each must know of the other, once a connection; the
   consumer keeps it in `connect()`.
3. A sync. The producer calls `publish()` for each gathered group, `serve()` for each pull whose group is published
   (the returned fields go to the consumers), `release()` when a group's last free signal came. The consumer calls
   `begin_read()` when the producer says ready, `poll()` until the pull is in `landed`, and `copies()` in the scatter
   thread.
4. `close()` on both sides. After a failed sync the consumer passes `poisoned=True`: a transfer may still be under way,
   so memory that it could write to must not be reused.

`frees_on_landing` says when a consumer may signal that it is done with a group: when the bytes have landed in a slot
of its own, or, where it copies straight from the producer's memory, only after the copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from rdtexec.plans import TrainerPlan, WorkerPlan
from rdtexec.pool import ReceivePool
from rdtexec.schedule import Pull

Copies = Callable[[], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]


class ConsumerTransport(ABC):
    """A worker's end."""

    name: ClassVar[str]
    needs_slots: ClassVar[bool]
    frees_on_landing: ClassVar[bool]

    @abstractmethod
    def attach(self, plan: WorkerPlan, destination: Any, pool: ReceivePool | None) -> None:
        """Bind to the plan and the memory, once, before anything else."""

    def hello(self) -> dict[str, Any]:
        """Facts for the producer."""
        return {}

    @abstractmethod
    def connect(self, producer: int, welcome: dict[str, Any]) -> None:
        """Keep what the producer said."""

    @abstractmethod
    def begin_read(self, pull: Pull, producer: int, ready: dict[str, Any]) -> None:
        """The producer has the chunk ready: start moving it."""

    @abstractmethod
    def poll(self) -> list[Pull]:
        """Pulls that have landed since the last call. TransferError when a transfer failed."""

    @property
    @abstractmethod
    def reading(self) -> bool:
        """True while a transfer is under way, so that `poll` must be called again."""

    @abstractmethod
    def copies(self, pull: Pull) -> Copies:
        """(destination views, source views) of a landed pull, to be evaluated in the scatter thread."""

    @abstractmethod
    def close(self, *, poisoned: bool) -> None:
        """Give everything back."""


class ProducerTransport(ABC):
    """A trainer rank's end."""

    name: ClassVar[str]
    share_slots: ClassVar[bool]
    """Do consumers with the same plan read one packed slot?"""

    @abstractmethod
    def attach(self, plan: TrainerPlan, sharers: dict[int, tuple[int, ...]]) -> None:
        """Bind to the plan; `sharers[c]` are the consumers that share serve slots with c."""

    @abstractmethod
    def welcome(self, consumer: int, hello: dict[str, Any]) -> dict[str, Any]:
        """Facts for the consumer."""

    @abstractmethod
    def publish(self, group: int, tensors: dict[int, torch.Tensor]) -> None:
        """A group was gathered; `tensors` by manifest index, contiguous, in the plan's dtype and shape."""

    @abstractmethod
    def serve(self, consumer: int, chunk: int, seq: int) -> dict[str, Any]:
        """Make a chunk readable and return what its readers must know."""

    @abstractmethod
    def release(self, group: int) -> None:
        """The group's memory may be reused."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""
