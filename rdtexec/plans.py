"""Plans as the runtime holds them: one worker's or one trainer rank's part, verified, with nothing of the others.

Loading refuses a plan that is damaged (PlanFormatError), impossible (PlanError), or meant for another place
(PlanMismatch).
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any

from attrs import frozen

from rdtplan.errors import PlanMismatch
from rdtplan.inputs.manifests import by_pieces, from_weight_source
from rdtplan.ir.file import PlanFile
from rdtplan.ir.manifest import Ints, Manifest, SourceTensor
from rdtplan.ir.plan import ConsumerPlan, GatherGroup, ProducerPlan, Program
from rdtplan.ir.topology import InferenceTopology, Ownership, Position, TransferSettings
from rdtplan.verify.findings import Finding, refuse
from rdtplan.verify.structure import (
    check_manifest,
    check_ownership,
    check_producer,
    check_program,
    check_routing,
    check_worker,
)


@frozen
class WorkerPlan:
    """What one consumer needs to execute its plan."""

    identity: str
    """The fleet plan's identity: both ends of every connection must have the same."""
    consumer: ConsumerPlan
    manifest: Manifest
    ownership: Ownership
    groups: tuple[GatherGroup, ...]
    topology: InferenceTopology
    settings: TransferSettings
    slot_nbytes: int
    """Bytes of one receive slot."""

    @property
    def owners_of_group(self) -> tuple[Ints, ...]:
        """Trainer ranks that own part of each gather group, ascending."""
        return owners_of_groups(self.ownership, self.groups)

    def chunk_label(self, chunk: int) -> str:
        """A chunk in words, for errors and logs."""
        chunks = self.consumer.program.chunks
        group = self.groups[chunks.group[chunk]]
        return f"chunk {chunk} (group {group.label}, {chunks.nbytes[chunk]:,} bytes)"


@frozen
class TrainerPlan:
    """What one producer needs: its own part, and the programs of the consumers it serves."""

    identity: str
    producer: ProducerPlan
    consumers: dict[int, ConsumerPlan]
    """By consumer id; those this rank serves."""
    consumer_ids: Ints
    """Every consumer of the fleet: all of them signal."""
    manifest: Manifest
    ownership: Ownership
    groups: tuple[GatherGroup, ...]
    topology: InferenceTopology
    settings: TransferSettings

    def own_names(self, group: int) -> list[int]:
        """Manifest indices of the names of `group` that this rank owns, in plan order."""
        g = self.groups[group]
        rank = self.producer.rank
        return [k for k in range(g.first, g.first + g.count) if rank in self.ownership.owners(k)]


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """A plan is many small objects that all stay: looking for cycles among them, and all of torch, costs a tenth."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def owners_of_groups(ownership: Ownership, groups: tuple[GatherGroup, ...]) -> tuple[Ints, ...]:
    """Union of the owner sets of every group."""
    found: list[Ints] = []
    for g in groups:
        classes = {ownership.class_of[k] for k in range(g.first, g.first + g.count)}
        found.append(tuple(sorted({r for c in classes for r in ownership.classes[c]})))
    return tuple(found)


def load_worker(
    path: str | os.PathLike[str],
    consumer_id: int,
    *,
    position: Position | None = None,
    replica: int | None = None,
    target: str | None = None,
) -> WorkerPlan:
    """Load and verify one worker's plan. `position`, `replica` and `target` are where the worker really stands and what
    it runs on, when it knows."""
    with _no_garbage(), PlanFile(path) as file:
        planned_for = file.field("compiler").target
        if target is not None and planned_for != target:
            raise PlanMismatch(
                f"plan {file.path} was compiled for target {planned_for}, this worker runs on {target}",
                fix=f"compile it with --target {target}",
                code="RDT516",
            )
        consumer = file.consumer(consumer_id)
        for name, planned, actual in (
            ("position", consumer.position, position),
            ("replica", consumer.replica, replica),
        ):
            if actual is not None and planned != actual:
                raise PlanMismatch(
                    f"plan {file.path} gives consumer {consumer_id} the {name} {planned}, this worker has {actual}",
                    fix="compile for the layout that runs, or start the worker with the rank the plan was made for",
                    code="RDT502",
                )
        manifest, ownership, groups = file.field("manifest"), file.field("ownership"), file.field("groups")
        slot_nbytes = file.field("memory").receive_slot_nbytes
        findings: list[Finding] = check_manifest(manifest)
        findings = findings or check_worker(consumer, manifest, ownership, groups)
        largest = max(consumer.program.chunks.nbytes, default=0)
        if not findings and slot_nbytes < largest:
            what = f"memory.receive_slot_nbytes: {slot_nbytes:,} is less than a chunk of {largest:,} bytes"
            findings.append(Finding("RDT330", what, ("memory.receive_slot_nbytes",)))
        refuse(findings)
        return WorkerPlan(
            identity=file.field("identity"),
            consumer=consumer,
            manifest=manifest,
            ownership=ownership,
            groups=groups,
            topology=file.field("topology"),
            settings=file.field("settings"),
            slot_nbytes=slot_nbytes,
        )


def load_trainer(path: str | os.PathLike[str], rank: int) -> TrainerPlan:
    """Load and verify one trainer rank's plan."""
    with _no_garbage(), PlanFile(path) as file:
        producer = file.producer(rank)
        manifest, ownership, groups = file.field("manifest"), file.field("ownership"), file.field("groups")
        topology = file.field("topology")
        findings: list[Finding] = check_manifest(manifest) or check_ownership(ownership, manifest, groups)
        refuse(findings)
        consumers: dict[int, ConsumerPlan] = {}
        seen: set[int] = set()
        for serving in producer.servings:
            consumer = file.consumer(serving.consumer_id)
            consumers[serving.consumer_id] = consumer
            if id(consumer.program) not in seen:
                seen.add(id(consumer.program))
                where = f"consumers[{serving.consumer_id}].program"
                findings += check_program(consumer.program, manifest, len(groups), len(ownership.classes), where)
            if not findings:
                where = f"consumers[{serving.consumer_id}]"
                findings += check_routing(consumer.program, consumer.routing, manifest, ownership, where)
        refuse(findings or check_producer(producer, consumers.values(), topology.workers, manifest, ownership, groups))
        return TrainerPlan(
            identity=file.field("identity"),
            producer=producer,
            consumers=consumers,
            consumer_ids=tuple(range(topology.workers)),
            manifest=manifest,
            ownership=ownership,
            groups=groups,
            topology=topology,
            settings=file.field("settings"),
        )


def check_live_manifest(plan: TrainerPlan, source: Any) -> None:
    """Compare the plan's manifest with what a WeightSource declares; PlanMismatch RDT503 names the first difference.

    Order does not matter: the trainer gathers in plan order. What this rank serves it must hold.
    """
    live: dict[str, SourceTensor] = {e.name: e for e in by_pieces(from_weight_source(source))}
    declared = list(live.values())
    for k, name in enumerate(plan.manifest.names):
        entry = live.pop(name, None)
        planned = (plan.manifest.dtype(k), plan.manifest.shape(k))
        actual = None if entry is None else (entry.dtype, entry.shape)
        if actual != planned:
            found = "the trainer does not have it" if entry is None else f"trainer {entry.dtype} {entry.shape}"
            raise PlanMismatch(
                f"source name {name!r}: plan {planned[0]} {planned[1]}, {found}",
                fix="compile the plan from this trainer's manifest",
                code="RDT503",
            )
    if live:
        raise PlanMismatch(
            f"the trainer declares {next(iter(live))!r} and {len(live) - 1} more names that the plan does not know",
            fix="compile the plan from this trainer's manifest",
            code="RDT503",
        )
    _check_holding(plan, source, declared)


def _check_holding(plan: TrainerPlan, source: Any, declared: list[SourceTensor]) -> None:
    """What this rank serves it must hold, and what ranks gather together all of them must serve, or they hang."""
    rank = plan.producer.rank
    listed = source.held_names() if hasattr(source, "held_names") else None
    held = {e.name for e in declared if e.owners is None or rank in e.owners} if listed is None else set(listed)
    fix = "compile the plan with the owners that this trainer really has"
    for k, name in enumerate(plan.manifest.names):
        owners = plan.ownership.owners(k)
        if rank in owners and name not in held:
            what = f"the plan has trainer rank {rank} serve {name!r}, which that rank does not hold"
            raise PlanMismatch(what, fix=fix, code="RDT503")
        partners = source.partners(name) if hasattr(source, "partners") else ()
        if not set(partners) <= set(owners):
            what = f"{name!r} is gathered by trainer ranks {list(partners)} together, the plan gives it {list(owners)}"
            raise PlanMismatch(what, fix=fix, code="RDT503")


def chunk_keys(program: Program, chunk: int) -> range:
    """Indices into `program.keys` of one chunk."""
    return range(program.chunks.key_end[chunk - 1] if chunk else 0, program.chunks.key_end[chunk])


def chunk_scatters(program: Program, chunk: int) -> range:
    """Indices into `program.scatters` of one chunk."""
    return range(program.chunks.scatter_end[chunk - 1] if chunk else 0, program.chunks.scatter_end[chunk])
