"""The trainer's engine: one producer a rank, and rank 0 drives the inference side through the client it is given."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from attrs import evolve, frozen
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from rdtexec.calls import Call
from rdtexec.control import Address
from rdtexec.plans import TrainerPlan, check_live_manifest, load_trainer
from rdtexec.producer import GroupSource, Producer
from rdtexec.ranks import Ranks
from rdtexec.reports import Observer, ProducerReport
from rdtexec.transport import SETTINGS
from rdtexec.vllm.clients import ReplicaClient, call_within
from rdtplan.errors import InputError, PlanMismatch, RdtError, TransferError
from rdtplan.inputs.manifests import from_weight_source
from rdtplan.ir.file import encode, write_plan
from rdtplan.ir.manifest import SourceTensor
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import TransferSettings
from rdtplan.trace.watch import DRAFT

_T = TypeVar("_T")


@dataclass
class RdtExecTrainerInitInfo(TrainerInitInfo):
    """Settings of one trainer rank. What is wrong is named together, at init."""

    backend: ClassVar[str] = "rdtexec"

    plan: str = ""
    """Path of the fleet plan; workers fetch it from rank 0. Empty: it is compiled at init, from the source and from
    what every worker tells of its live model."""
    save_plan: str = ""
    """Where rank 0 writes the plan that was compiled at init: the next start can be given it as `plan`."""
    waive: tuple[str, ...] = ()
    """Findings to accept when a plan is compiled at init, as `rdtplan compile --waive` takes them: `CODE:PATTERN`."""
    transport: str = "auto"
    """`local`, `nixl`, `ray_rdt`, or `auto`: for each worker local on one node, nixl otherwise."""
    address: str | tuple[str, int] | None = None
    """Where this rank listens: a Unix socket's path or (host, port), port 0 for any. None: a private Unix socket, for
    one machine."""
    num_consumers: int = 0
    """Workers of the whole fleet; 0: as many as the plan has."""
    workers_per_replica: int = 0
    """Workers of one engine; 0: as many as the plan has."""
    num_rdt_buffers: int | None = None
    """This and the next five size the transfer. They are in the plan: given here, they must agree with it, or are what
    it is compiled with at init."""
    buffer_presize_gb: float | None = None
    stages_in_flight: int | None = None
    gather_lookahead: int | None = None
    staging_device: str | None = None
    max_chunk_bytes: int | None = None
    stall_timeout_s: float = 300.0
    """How long nothing may happen before a sync fails. A liveness backstop, not a latency target."""
    connect_timeout_s: float = 60.0
    """How long a worker tries to reach a producer."""
    repair_reload: bool = False
    """Let the workers run the post-processing step that vLLM skips when it reloads unquantized experts."""
    checksums: str = "off"
    """`off`, `sampled` or `full`: workers prove chunks equal to this trainer's tensors, byte for byte."""
    on_identical: str = "warn"
    """`warn`, `fail` or `ignore` when a sync sends what the one before had sent."""
    stats_dir: str = ""
    """Directory for one JSON line a sync, `producer-RANK.jsonl` here and `consumer-ID.jsonl` on the workers."""
    record_chunks: bool = False
    """Put the times of every chunk into the workers' lines."""
    metrics_port: int = 0
    """Serve Prometheus metrics: this rank on `metrics_port + rank`; 0: not."""
    worker_metrics_port: int = 0
    """The same for the workers: `worker_metrics_port + consumer id`."""


_PLANNED = (
    *("num_rdt_buffers", "buffer_presize_gb", "stages_in_flight", "gather_lookahead", "staging_device"),
    "max_chunk_bytes",
)


class RdtExecTrainer(TrainerWeightTransferEngine[RdtExecTrainerInitInfo]):
    """Backend `rdtexec` of a trainer. With several ranks, torch.distributed must be initialized."""

    init_info_cls = RdtExecTrainerInitInfo

    def __init__(
        self,
        init_info: RdtExecTrainerInitInfo,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        producer: Producer,
        ranks: Ranks,
        payload: dict[str, Any],
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank
        self._info = init_info
        self._producer = producer
        self._ranks = ranks
        self._payload = payload
        self._open = False
        """On rank 0: may an update be open at the inference side? vLLM ends one whose `update_weights` fails alone."""
        self.last_report: ProducerReport | None = None
        """The last sync, as this rank saw it."""

    @classmethod
    def trainer_init(
        cls,
        init_info: RdtExecTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Hold the plan to the source, start this rank's producer, and have rank 0 connect the workers.

        InputError names every setting that is wrong, PlanMismatch the first weight or rank that differs. An error on
        one rank is raised on all, with its rank; nothing is left running after it.
        """
        facts = _on_every_rank(init_info.rank, lambda: _checked(init_info, source))
        assert source is not None
        _check_all_have_plans(facts)
        authkey = facts[0].authkey
        if init_info.plan:
            patience = init_info.connect_timeout_s + init_info.stall_timeout_s
            connect = lambda payload: call_within(patience, client, "init_weight_transfer_engine", payload)  # noqa: E731
            return cls._init_with_plan(init_info, init_info.plan, authkey, client, source, connect)
        held = [rank.held for rank in facts]
        with _plan_of_live_fleet(init_info, authkey, client, source, held) as (path, connect):
            return cls._init_with_plan(init_info, path, authkey, client, source, connect)

    @classmethod
    def _init_with_plan(
        cls,
        init_info: RdtExecTrainerInitInfo,
        path: str,
        authkey: bytes,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        connect: Callable[[dict[str, Any]], None],
    ) -> Self:
        """Serve the plan at `path`; rank 0 has the workers connect by `connect`, which is given their payload."""
        mine: list[tuple[TrainerPlan, Producer, Ranks]] = []
        with contextlib.ExitStack() as undo:

            def listen() -> tuple[int, str, Any, Any]:
                plan = load_trainer(path, init_info.rank)
                producer = _producer(init_info, plan, path, authkey, source)
                undo.callback(producer.close)
                ranks = Ranks(
                    init_info.rank,
                    plan.ownership.ranks,
                    authkey=authkey,
                    stall_timeout_s=init_info.stall_timeout_s,
                    where=_beside(init_info),
                )
                undo.callback(ranks.close)
                mine.append((plan, producer, ranks))
                return init_info.rank, plan.identity, producer.address, ranks.address

            everyone = _on_every_rank(init_info.rank, listen)
            plan, producer, ranks = mine[0]
            _check_agreement([member[:3] for member in everyone], plan.ownership.ranks)
            payload = _worker_payload(init_info, plan, authkey, {member[0]: member[2] for member in everyone})

            def meet() -> None:
                ranks.connect(next(member[3] for member in everyone if member[0] == 0))
                if init_info.is_sender:
                    if writes_draft_model(plan):
                        show_draft_model(client, init_info.stall_timeout_s)
                    connect(payload)

            _on_every_rank(init_info.rank, meet)
            undo.pop_all()
        return cls(init_info, client, source, producer, ranks, payload)

    def init_payload(self, replica_rank: int = 0) -> dict[str, Any]:
        """What `init_weight_transfer_engine` of one engine is to be called with.

        For an engine that was restarted: give it this, between two syncs, and it takes part in the next. Reads what
        this rank already has; no other rank takes part.
        """
        return {**self._payload, "replica_rank": replica_rank}

    def send_weights(
        self, live_consumer_ids: Collection[int] | None = None, *, weight_version: str | None = None
    ) -> None:
        """Send the source's weights as they are now to every worker; every trainer rank calls it.

        `live_consumer_ids` are the workers that take part, the same on every rank; None: all of the plan. Returns when
        they serve from the new weights and this rank's memory is free again. TransferError, on every rank, when that
        did not happen on any of them; another sync can be tried then.
        """
        try:
            self.last_report = self._ranks.together(
                ready=lambda: self._start(live_consumer_ids),
                serve=lambda number: self._serve(number, live_consumer_ids),
                finish=lambda: self._finish(weight_version),
                terms={"live_consumer_ids": None if live_consumer_ids is None else sorted(set(live_consumer_ids))},
            )
        except BaseException:
            self._producer.forget_payload()  # a retry sends the same on purpose
            raise

    def _start(self, live: Collection[int] | None) -> None:
        plan = self._producer.plan
        self._producer.taking_part(live)  # before a worker has begun an update that nobody would serve
        if isinstance(self.client, ReplicaClient):
            self.client.limit_to(plan.consumer_ids if live is None else live, plan.topology.workers_per_replica)
        if self._open:
            with contextlib.suppress(Exception):  # RDT632 where it was open, and vLLM's own error where it was not
                call_within(self._info.stall_timeout_s, self.client, "update_weights", {"abandon": True})
        self._open = True
        call_within(self._info.stall_timeout_s, self.client, "start_weight_update")

    def _serve(self, number: int, live: Collection[int] | None) -> ProducerReport:
        """This rank's part; rank 0 also has the workers pull, in a thread."""
        if not self.is_sender:
            return self._producer.sync(number, live)

        def failed(error: BaseException) -> None:
            self._open = False
            self._producer.cancel(number, f"update_weights failed: {error}")

        updating = Call("update_weights", lambda: self.client.update_weights({"sync_idx": number}), failed=failed)
        try:
            report = self._producer.sync(number, live)
        except Exception as error:  # whatever it was, the call must not run into the next sync
            updating.ended(self._info.stall_timeout_s)
            if updating.error is not None:
                error.add_note(f"update_weights ended with {type(updating.error).__name__}: {updating.error}")
            raise
        try:
            updating.result(self._info.stall_timeout_s)
        except BaseException as error:
            if updating.error is None:  # it hangs, though the workers took everything
                raise
            raise TransferError(f"sync {number} failed on the inference side: {error}", code="RDT606") from error
        return report

    def _finish(self, weight_version: str | None) -> None:
        given = () if weight_version is None else (weight_version,)
        call_within(self._info.stall_timeout_s, self.client, "finish_weight_update", *given)
        self._open = False

    def shutdown(self) -> None:
        """Stop serving."""
        self._ranks.close()
        self._producer.close()


@frozen
class _RankFacts:
    """What one rank brings to an init."""

    held: frozenset[str] | None
    """Names it holds, None for all."""
    authkey: bytes
    """Rank 0's is the one that counts."""
    has_plan: bool


def _checked(info: RdtExecTrainerInitInfo, source: WeightSource | None) -> _RankFacts:
    """What this rank brings; InputError RDT111 when its arguments cannot be used."""
    if source is None or info.transport not in SETTINGS:
        wanted = f"a WeightSource and a transport of {', '.join(SETTINGS)}"
        raise InputError(f"rdtexec needs {wanted}, got {source!r} and {info.transport!r}", code="RDT111")
    _check_gives_full_tensors(source)
    return _RankFacts(_held_names(source), secrets.token_bytes(32), bool(info.plan))


def _check_all_have_plans(facts: Sequence[_RankFacts]) -> None:
    """InputError RDT111 when some ranks alone were given a plan file: the others would compile one."""
    given = [rank for rank, of_rank in enumerate(facts) if of_rank.has_plan]
    missing = [rank for rank, of_rank in enumerate(facts) if not of_rank.has_plan]
    if given and missing:
        raise InputError(
            f"trainer rank {missing[0]} was given no plan, trainer rank {given[0]} was",
            fix="give every rank the path of a plan, or none",
            code="RDT111",
        )


def _producer(
    info: RdtExecTrainerInitInfo, plan: TrainerPlan, path: str, authkey: bytes, source: WeightSource
) -> Producer:
    """This rank's producer, started; InputError or PlanMismatch when settings or source do not fit the plan."""
    _check_settings(info, plan)
    check_live_manifest(plan, source)
    port = info.metrics_port + info.rank if info.metrics_port else 0
    return Producer(
        plan,
        group_source(source),
        info.transport,
        authkey=authkey,
        address=info.address,
        device=_serve_device(plan),
        stall_timeout_s=info.stall_timeout_s,
        plan_bytes=Path(path).read_bytes(),
        checksums=info.checksums,
        on_identical=info.on_identical,
        observer=Observer("producer", info.rank, plan.identity, directory=info.stats_dir, metrics_port=port),
    )


def writes_draft_model(plan: TrainerPlan) -> bool:
    """Does any worker of the plan have a draft model written?"""
    programs = {id(c.program): c.program for c in plan.consumers.values()}
    return any(name.startswith(DRAFT) for program in programs.values() for name in program.parameters.names)


def show_draft_model(client: Any, timeout_s: float) -> None:
    """Have vLLM hand the draft model to every worker; InputError RDT111 for a client that cannot ask for it.

    TransferError RDT602 when one of the two calls takes longer than `timeout_s` seconds.
    """
    if not hasattr(client, "start_draft_weight_update"):
        raise InputError(
            f"the plan writes a draft model, and client {type(client).__name__} has no start_draft_weight_update",
            fix="give the client that method (vLLM serves it at /start_draft_weight_update), or compile without "
            "--speculative-config",
            code="RDT111",
        )
    call_within(timeout_s, client, "start_draft_weight_update")
    call_within(timeout_s, client, "finish_weight_update")


def _check_settings(info: RdtExecTrainerInitInfo, plan: TrainerPlan) -> None:
    """InputError RDT111 names every setting that is wrong or that the plan was not compiled with."""
    wrong = []
    planned: dict[str, Any] = {name: getattr(plan.settings, name) for name in _PLANNED}
    planned |= {"num_consumers": plan.topology.workers, "workers_per_replica": plan.topology.workers_per_replica}
    for name, value in planned.items():
        given = getattr(info, name)
        unset = given is None or (given == 0 and name in ("num_consumers", "workers_per_replica"))
        if not unset and given != value:
            wrong.append(f"{name} is {given!r}, the plan was compiled with {value!r}")
    wrong += _wrong_by_itself(info)
    if wrong:
        raise InputError("trainer settings: " + "; ".join(wrong), fix="mend them, or compile again", code="RDT111")


def _wrong_by_itself(info: RdtExecTrainerInitInfo) -> list[str]:
    """Settings that no plan could make right."""
    wrong = [
        f"{name} must be positive, is {getattr(info, name)}"
        for name in ("stall_timeout_s", "connect_timeout_s")
        if getattr(info, name) <= 0
    ]
    if info.plan:
        wrong += [
            f"{name} is for a plan that is compiled at init" for name in ("save_plan", "waive") if getattr(info, name)
        ]
    elif info.save_plan and not Path(info.save_plan).absolute().parent.is_dir():
        wrong.append(f"save_plan: the directory of {info.save_plan} does not exist")
    return wrong


def _serve_device(plan: TrainerPlan) -> torch.device:
    """Where chunks are packed: this rank's GPU, if it has one and the plan stages there."""
    if plan.settings.staging_device == "gpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _worker_payload(
    info: RdtExecTrainerInitInfo, plan: TrainerPlan, authkey: bytes, addresses: dict[int, Any]
) -> dict[str, Any]:
    """Init info of the workers, JSON throughout; `replica_rank` differs from engine to engine."""
    return {
        **_settings_of_workers(info, authkey),
        "producers": {str(rank): address for rank, address in addresses.items()},
        "num_replicas": plan.topology.replicas,
        "num_consumers": plan.topology.workers,
        "data_parallel_size": plan.topology.data_parallel,
    }


def _settings_of_workers(info: RdtExecTrainerInitInfo, authkey: bytes) -> dict[str, Any]:
    """What of it is known before there is a plan."""
    return {
        "authkey": authkey.hex(),
        "transport": info.transport,
        "replica_rank": 0,
        "stall_timeout_s": info.stall_timeout_s,
        "connect_timeout_s": info.connect_timeout_s,
        "repair_reload": info.repair_reload,
        "checksums": info.checksums,
        "stats_dir": info.stats_dir,
        "record_chunks": info.record_chunks,
        "metrics_port": info.worker_metrics_port,
    }


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

    def partners(self, name: str) -> tuple[int, ...]:
        """All ranks, unless the source says otherwise: of a WeightSource a pass is typically a collective."""
        if hasattr(self._source, "partners"):
            return tuple(self._source.partners(name))
        return tuple(range(torch.distributed.get_world_size())) if _distributed() else ()

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """`names` in order. What the source yields before its turn is kept until it is asked for."""
        for name in names:
            while name not in self._early:
                item = next(self._pass, None)
                if item is None:
                    return
                if item[1] is not None:
                    self._early[item[0]] = item[1].detach() if item[1].requires_grad else item[1]
            yield name, self._early.pop(name)


def _check_gives_full_tensors(source: Any) -> None:
    """InputError RDT111 for a source (of vLLM 0.33) that yields a rank's pieces alone and does not say which."""
    if not hasattr(source, "gather") and hasattr(source, "implements_iter_full") and not source.implements_iter_full():
        raise InputError(
            f"{type(source).__name__} yields local pieces only (iter_local), rdtexec sends full tensors",
            fix="implement iter_full, which gathers each name among its owners",
            code="RDT111",
        )


@contextlib.contextmanager
def _plan_of_live_fleet(
    info: RdtExecTrainerInitInfo,
    authkey: bytes,
    client: VLLMWeightSyncClient,
    source: WeightSource,
    held: list[frozenset[str] | None],
) -> Iterator[tuple[str, Callable[[dict[str, Any]], None]]]:
    """The path of a plan that rank 0 compiles now and hands to all, and how rank 0 then has the workers connect.

    A failure is raised on every rank, and told to all workers.
    """
    plan = b""
    connect: Callable[[dict[str, Any]], None] = lambda _: None  # noqa: E731
    with tempfile.TemporaryDirectory(prefix="rdtexec-plan-") as scratch, contextlib.ExitStack() as undo:

        def make() -> None:
            nonlocal plan, connect
            if info.rank == 0:
                compiled, answer_workers = undo.enter_context(_compiled_live(info, authkey, client, source, held))
                plan = encode(compiled)[0]
                if info.save_plan:
                    write_plan(compiled, info.save_plan)
                connect = lambda payload: answer_workers(payload["producers"])  # noqa: E731

        _on_every_rank(info.rank, make)
        plan = _from_rank_0(plan)
        path = Path(scratch) / "fleet.plan"
        _on_every_rank(info.rank, lambda: path.write_bytes(plan))
        yield str(path), connect


def _compiled_live(
    info: RdtExecTrainerInitInfo,
    authkey: bytes,
    client: VLLMWeightSyncClient,
    source: WeightSource,
    held: list[frozenset[str] | None],
) -> contextlib.AbstractContextManager[tuple[FleetPlan, Callable[[Mapping[str, Any]], None]]]:
    """`rdtexec.live_compile.compiled_live` with what this trainer is. Imported here: it brings the compiler with it."""
    from rdtexec.live_compile import compiled_live
    from rdtplan.verify.waivers import parse_waiver

    wrong = _wrong_by_itself(info)
    if wrong:
        raise InputError("trainer settings: " + "; ".join(wrong), fix="mend them", code="RDT111")
    given = {name: getattr(info, name) for name in _PLANNED if getattr(info, name) is not None}
    engines = info.num_consumers // info.workers_per_replica if info.workers_per_replica > 0 else 1
    payload = {**_settings_of_workers(info, authkey), "num_replicas": max(engines, 1)}
    return compiled_live(
        _with_owners(from_weight_source(source), held),
        torch.distributed.get_world_size() if _distributed() else 1,
        TransferSettings(**given),
        tuple(map(parse_waiver, info.waive)),
        lambda address: client.init_weight_transfer_engine({**payload, "compile_at": address}),
        authkey=authkey,
        where=_beside(info),
        timeout_s=info.stall_timeout_s,
    )


def _beside(info: RdtExecTrainerInitInfo) -> Address | None:
    """Where else rank 0 listens: on any port of the host that its producer listens at; None on one machine."""
    return None if info.address is None or isinstance(info.address, str) else (info.address[0], 0)


def _held_names(source: WeightSource) -> frozenset[str] | None:
    """Names this rank holds, None for all. Of vLLM 0.32: from 0.33 on the metadata name the owners of each."""
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


def _on_every_rank(rank: int, act: Callable[[], _T]) -> list[_T]:
    """What `act` returns on every rank; when it raises on some, all raise the first error, which names its rank."""
    cause: BaseException | None = None
    mine: _T | RdtError
    try:
        mine = act()
    except BaseException as error:
        if not _distributed() or torch.distributed.get_world_size() == 1:
            raise
        cause = error
        words = f"{type(error).__name__}: {error}"
        mine = error if isinstance(error, RdtError) else TransferError(words, code="RDT606")
    everyone = _gathered((rank, mine))
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    for other, found in everyone:
        if isinstance(found, RdtError):
            raise type(found)(f"trainer rank {other}: {found.message}", fix=found.fix, code=found.code) from cause
    return [found for _, found in everyone]


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
