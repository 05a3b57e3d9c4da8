"""The trainer's engine: one producer a rank, and rank 0 drives the inference side through the client it is given."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from attrs import evolve
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from rdtexec.plans import check_live_manifest, load_trainer
from rdtexec.producer import GroupSource, Producer, ProducerReport
from rdtexec.transport import PRODUCERS
from rdtplan.errors import InputError, PlanMismatch, TransferError
from rdtplan.inputs.manifests import from_weight_source, to_json
from rdtplan.ir.manifest import SourceTensor


@dataclass
class RdtExecTrainerInitInfo(TrainerInitInfo):
    """Settings of one trainer rank."""

    backend: ClassVar[str] = "rdtexec"

    plan: str = ""
    """Path of the fleet plan; workers fetch it from rank 0. Empty: rank 0 compiles it at init for `model`."""
    model: str = ""
    """Model directory that the workers serve (its config is read); only for compiling at init."""
    compile_options: tuple[str, ...] = ()
    """Options of `rdtplan compile` for compiling at init: `--tp 2 --ep` and so on. Trainer ranks and the manifest are
    taken from the trainer itself."""
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
        with tempfile.TemporaryDirectory(prefix="rdtexec-plan-") as scratch:
            return cls._init_with_plan(init_info, _plan_path(init_info, source, Path(scratch)), client, source)

    @classmethod
    def _init_with_plan(
        cls, init_info: RdtExecTrainerInitInfo, path: str, client: VLLMWeightSyncClient, source: WeightSource
    ) -> Self:
        plan = load_trainer(path, init_info.rank)
        check_live_manifest(plan, source)
        authkey = _from_rank_0(secrets.token_bytes(32))
        producer = Producer(
            plan,
            group_source(source),
            PRODUCERS[init_info.transport](),
            authkey=authkey,
            address=init_info.address,
            stall_timeout_s=init_info.stall_timeout_s,
            plan_bytes=Path(path).read_bytes(),
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


def group_source(source: Any) -> GroupSource:
    """`source` itself if it can gather any group (`rdtexec.sources`), else its passes read group by group."""
    return source if hasattr(source, "gather") else IteratedSource(source)


class IteratedSource:
    """A WeightSource read group by group. Each sync is one fresh pass; names are given out as they are asked for."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._pass: Iterator[tuple[str, torch.Tensor | None]] = iter(())
        self._early: dict[str, torch.Tensor] = {}

    def start(self) -> None:
        """Begin a sync."""
        source: Any = self._source  # vLLM 0.33 has no __iter__
        self._pass = source.iter_full() if hasattr(source, "iter_full") else iter(source)
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


def _plan_path(init_info: RdtExecTrainerInitInfo, source: WeightSource, scratch: Path) -> str:
    """The plan file of this rank: the one it was given, or rank 0's, compiled now and handed to all.

    Compiled by the command line in a process of its own: this one may hold a live model.
    """
    if init_info.plan:
        return init_info.plan
    path = scratch / "fleet.plan"
    answer: tuple[bytes, str] = (b"", "")
    held = _gathered(_held_names(source))
    if init_info.rank == 0:
        manifest = scratch / "manifest.json"
        manifest.write_bytes(to_json(_with_owners(from_weight_source(source), held)))
        ranks = str(torch.distributed.get_world_size() if _distributed() else 1)
        command = [sys.executable, "-m", "rdtplan.cli", "compile", init_info.model, "--manifest", str(manifest)]
        command += ["--trainer-ranks", ranks, "-o", str(path), *init_info.compile_options]
        done = subprocess.run(command, capture_output=True, text=True)
        answer = (path.read_bytes(), "") if done.returncode == 0 else (b"", done.stderr.strip()[-4000:])
    data, reason = _from_rank_0(answer)
    if reason:
        raise InputError(f"no plan could be compiled at init:\n{reason}", code="RDT111")
    path.write_bytes(data)
    return str(path)


def _held_names(source: WeightSource) -> frozenset[str] | None:
    """Names this rank holds, None for all; vLLM 0.33 says it in the metadata instead."""
    held = source.held_names() if hasattr(source, "held_names") else None
    return None if held is None else frozenset(held)


def _with_owners(entries: list[SourceTensor], held: list[frozenset[str] | None]) -> list[SourceTensor]:
    """Entries with the ranks that hold each, where any rank holds less than everything."""
    if all(names is None for names in held):
        return entries
    return [
        evolve(e, owners=tuple(rank for rank, names in enumerate(held) if names is None or e.name in names))
        for e in entries
    ]


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
