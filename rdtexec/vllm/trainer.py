"""The trainer's engine: one producer a rank, and rank 0 drives the inference side through the client it is given."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from rdtexec.plans import check_live_manifest, load_trainer
from rdtexec.producer import Producer, ProducerReport
from rdtexec.transport import PRODUCERS
from rdtplan.errors import InputError, PlanMismatch, TransferError


@dataclass
class RdtExecTrainerInitInfo(TrainerInitInfo):
    """Settings of one trainer rank."""

    backend: ClassVar[str] = "rdtexec"

    plan: str
    """Path of the fleet plan; workers fetch it from rank 0."""
    transport: str = "local"
    address: str | tuple[str, int] | None = None
    """Where this rank listens: a Unix socket's path or (host, port). None: a private Unix socket, for one machine."""
    stall_timeout_s: float = 300.0
    replica_rank: int = 0
    num_replicas: int = 1
    repair_reload: bool = False
    """Passed on to the workers."""


class RdtExecTrainer(TrainerWeightTransferEngine[RdtExecTrainerInitInfo]):
    """Backend `rdtexec` of a trainer. With several ranks, torch.distributed must be initialized."""

    init_info_cls = RdtExecTrainerInitInfo

    def __init__(
        self, init_info: RdtExecTrainerInitInfo, client: VLLMWeightSyncClient, source: WeightSource, producer: Producer
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._info = init_info
        self._producer = producer
        self._syncs = 0
        self.last_report: ProducerReport | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: RdtExecTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Hold the plan to the source, start this rank's producer, and have rank 0 connect the workers.

        PlanMismatch names the first weight or rank that differs; nothing is left running after an error.
        """
        if source is None or init_info.transport not in PRODUCERS:
            wanted = f"a WeightSource and a transport of {', '.join(PRODUCERS)}"
            raise InputError(f"rdtexec needs {wanted}, got {source!r} and {init_info.transport!r}", code="RDT111")
        plan = load_trainer(init_info.plan, init_info.rank)
        check_live_manifest(plan, source)
        authkey = _from_rank_0(secrets.token_bytes(32))
        producer = Producer(
            plan,
            IteratedSource(source),
            PRODUCERS[init_info.transport](),
            authkey=authkey,
            address=init_info.address,
            stall_timeout_s=init_info.stall_timeout_s,
            plan_path=init_info.plan,
        )
        try:
            everyone = _gathered((init_info.rank, plan.identity, producer.address))
            _check_agreement(everyone, plan.ownership.ranks)
            if init_info.is_sender:
                client.init_weight_transfer_engine(
                    {
                        "producers": {str(rank): address for rank, _, address in everyone},
                        "authkey": authkey.hex(),
                        "transport": init_info.transport,
                        "num_replicas": init_info.num_replicas,
                        "replica_rank": init_info.replica_rank,
                        "stall_timeout_s": init_info.stall_timeout_s,
                        "repair_reload": init_info.repair_reload,
                    }
                )
        except BaseException:
            producer.close()
            raise
        return cls(init_info, client, source, producer)

    def send_weights(self) -> None:
        """Send the source's weights as they are now to every worker; every trainer rank calls it.

        Returns when the workers serve from the new weights (on rank 0) and this rank's memory is free again.
        """
        number = self._syncs
        self._syncs += 1
        if not self.is_sender:
            self.last_report = self._producer.sync(number)
            return
        self.client.start_weight_update()
        failures: list[BaseException] = []

        def update() -> None:
            try:
                self.client.update_weights({"sync_idx": number})
            except BaseException as error:
                failures.append(error)

        updating = threading.Thread(target=update, name="rdtexec-update", daemon=True)
        updating.start()
        try:
            self.last_report = self._producer.sync(number)
        finally:
            updating.join(self._info.stall_timeout_s)
        if failures:
            raise TransferError(
                f"sync {number} failed on the inference side: {failures[0]}", code="RDT606"
            ) from failures[0]
        if updating.is_alive():
            raise TransferError(
                f"sync {number}: the workers took everything, but update_weights did not return within "
                f"{self._info.stall_timeout_s:.0f} s",
                fix="look at the post-processing of the workers",
                code="RDT602",
            )
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Stop serving."""
        self._producer.close()


class IteratedSource:
    """A WeightSource read group by group. Each sync is one fresh pass; names are given out as they are asked for."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._pass: Iterator[tuple[str, torch.Tensor | None]] = iter(())
        self._early: dict[str, torch.Tensor] = {}

    def start(self) -> None:
        """Begin a sync."""
        self._pass = iter(self._source)
        self._early = {}

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """`names` in order. What the source yields before its turn is kept until it is asked for."""
        for name in names:
            while name not in self._early:
                item = next(self._pass, None)
                if item is None:
                    return
                if item[1] is not None:
                    self._early[item[0]] = item[1].detach()
            yield name, self._early.pop(name)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _from_rank_0(value: Any) -> Any:
    if not _distributed():
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def _gathered(value: Any) -> list[Any]:
    if not _distributed():
        return [value]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def _check_agreement(everyone: list[tuple[int, str, Any]], planned: int) -> None:
    """Every rank is there once and holds the same plan; the rank that differs is named."""
    ranks = sorted(rank for rank, _, _ in everyone)
    if ranks != list(range(planned)):
        raise PlanMismatch(
            f"the plan is for trainer ranks 0 to {planned - 1}, these run: {ranks}",
            fix="compile with --trainer-ranks, or initialize torch.distributed on every rank first",
            code="RDT502",
        )
    identity = everyone[0][1]
    for rank, other, _ in everyone:
        if other != identity:
            raise PlanMismatch(
                f"trainer rank {rank} holds plan {other[:16]}, rank {everyone[0][0]} holds {identity[:16]}",
                fix="give every rank the same plan file",
                code="RDT505",
            )
