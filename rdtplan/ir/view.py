"""A plan to look at, whether it lies in a file or in memory."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

from rdtplan.ir.file import encode
from rdtplan.ir.manifest import Ints
from rdtplan.ir.plan import ConsumerPlan, FleetPlan, ProducerPlan


class PlanView(Protocol):
    """What reports read. `PlanFile` is one and reads only the parts that are asked for."""

    @property
    def digest(self) -> str:
        """The fleet digest."""

    @property
    def nbytes(self) -> int:
        """Size of the plan file."""

    def field(self, name: str) -> Any:
        """One field of FleetPlan."""

    def consumer(self, consumer_id: int) -> ConsumerPlan:
        """One worker's plan."""

    def producer(self, rank: int) -> ProducerPlan:
        """One trainer rank's plan."""

    def table(self, consumer_id: int, name: str) -> Any:
        """One table of a worker's program."""


def placement_of(plan: PlanView) -> dict[str, Ints]:
    """The expert in every slot of every layer, by leaf module; empty without EPLB."""
    width = plan.field("topology").workers_per_replica
    return {module: row for c in range(width) for module, row in plan.table(c, "experts").rows().items()}


class PlanInMemory:
    """A compiled or loaded plan as a view."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan

    @cached_property
    def _encoded(self) -> tuple[int, str]:
        data, digest = encode(self.plan)
        return len(data), digest

    @property
    def nbytes(self) -> int:
        return self._encoded[0]

    @property
    def digest(self) -> str:
        return self._encoded[1]

    def field(self, name: str) -> Any:
        return getattr(self.plan, name)

    def consumer(self, consumer_id: int) -> ConsumerPlan:
        return self.plan.consumers[consumer_id]

    def producer(self, rank: int) -> ProducerPlan:
        return self.plan.producers[rank]

    def table(self, consumer_id: int, name: str) -> Any:
        return getattr(self.plan.consumers[consumer_id].program, name)
