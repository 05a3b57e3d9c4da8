"""The worker's engine: loads its part of the plan, holds it to the live model, and executes a sync when told.

Init builds a candidate (plan, destination, connections) and commits it only when all of it succeeded; a failed re-init
leaves the active state untouched and releases only what it built. The receive pool is handed on from one to the next.

A sync that failed leaves the model partly overwritten: it cannot be finished. The next `start_weight_update` connects
anew, as an init with the same information would, because the sync that follows writes the whole model.
"""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rdtexec import checksum
from rdtexec.consumer import Consumer
from rdtexec.control import Address, fetch_plan
from rdtexec.plans import WorkerPlan, load_worker
from rdtexec.reports import LOG, Observer, SyncReport
from rdtexec.transport import SETTINGS
from rdtexec.vllm.live import live_target
from rdtexec.vllm.reload import LayerwiseDestination
from rdtplan.errors import InputError, PlanMismatch, TransferError
from rdtplan.ir.topology import InferenceTopology, Position
from rdtplan.trace.watch import DRAFT, has_draft_model, together

_DIGEST = re.compile("[0-9a-f]{12,64}")


@dataclass
class RdtExecInitInfo(WeightTransferInitInfo):
    """What the trainer tells a worker. Every value is checked; all that are wrong are named together."""

    producers: dict[str, Any] = field(default_factory=dict)
    """Trainer rank -> address of its control socket: a path, or [host, port]."""
    compile_at: Any = ""
    """Instead of `producers`: where trainer rank 0, which has no plan file, compiles the plan from what every worker
    tells of itself."""
    authkey: str = ""
    """Shared secret of the control sockets, hexadecimal."""
    plan: str = ""
    """Path of the fleet plan on this machine, or the digest of the plan to be fetched from the producers; empty: fetch
    whatever plan the lowest producer has."""
    transport: str = "auto"
    """`local`, `nixl`, `ray_rdt`, or `auto`: for each producer local on one node, nixl otherwise."""
    replica_rank: int = 0
    num_replicas: int = 1
    data_parallel_size: int = 0
    """The plan's. vLLM makes the data-parallel engines of a dense model independent: each knows its index alone."""
    num_consumers: int = 0
    """Workers of the whole fleet; 0: infer from the parallel config and `num_replicas`."""
    stall_timeout_s: float = 300.0
    connect_timeout_s: float = 60.0
    keep_draft_model: bool = False
    """Accept a plan that leaves the draft model out: it keeps the weights that it started with, and proposes worse and
    worse tokens."""
    repair_reload: bool = False
    """Run the post-processing step that vLLM skips when it reloads unquantized experts."""
    checksums: str = "off"
    """`off`, `sampled` or `full`: prove chunks equal to the producer's source, byte for byte."""
    stats_dir: str = ""
    """Directory on this machine for `consumer-ID.jsonl`, one line a sync."""
    record_chunks: bool = False
    """Put the times of every chunk into the report."""
    metrics_port: int = 0
    """Serve this process' Prometheus metrics on port `metrics_port + consumer id`; 0: not."""


@dataclass
class RdtExecUpdateInfo(WeightTransferUpdateInfo):
    """One sync."""

    sync_idx: int = -1
    """The trainer's number of this sync; -1: the one after the last."""
    abandon: bool = False
    """End the update without a sync. The call fails (RDT632): vLLM ends an update that failed, and one that is finished
    counts as new weights."""


class RdtExecEngine(WeightTransferEngine[RdtExecInitInfo, RdtExecUpdateInfo]):
    """Backend `rdtexec` of a vLLM worker."""

    init_info_cls = RdtExecInitInfo
    update_info_cls = RdtExecUpdateInfo
    supports_draft_weight_update = True
    """One update writes both models; vLLM's session for the draft model is how a worker gets to know it."""

    _draft: torch.nn.Module | None = None
    """The draft model, once vLLM has shown it."""
    _consumer: Consumer | None = None
    _destination: LayerwiseDestination | None = None
    _info: RdtExecInitInfo | None = None
    _synced = False
    """Was a sync done since the update started?"""
    _mixed = ""
    """Why the model is partly overwritten, from a sync that failed until the next that succeeds; empty: it is not."""
    last_report: SyncReport | None = None
    """The last sync, as this worker saw it."""

    def init_transfer_engine(self, init_info: RdtExecInitInfo) -> None:
        """Load, verify, connect; InputError, PlanMismatch or TransferError, and then nothing has changed."""
        self._check(init_info)
        if init_info.compile_at:
            init_info = self._compile_with_fleet(init_info)
        plan = self._load_plan(init_info)
        model = self._default_model
        if self._check_draft(init_info, plan):
            assert self._draft is not None
            model = together(model, self._draft)
        destination = LayerwiseDestination(
            model, self.vllm_config, plan.consumer.program, repair_reload=init_info.repair_reload
        )
        self._connect(init_info, plan, destination)

    def _connect(self, info: RdtExecInitInfo, plan: WorkerPlan, destination: LayerwiseDestination) -> None:
        """Make a consumer, and let it take the place of the one that there is."""
        number = plan.consumer.consumer_id
        port = info.metrics_port + number if info.metrics_port else 0
        old = self._consumer
        consumer = Consumer(
            plan,
            destination,
            info.transport,
            _producers(info),
            authkey=bytes.fromhex(info.authkey),
            hooks=destination,
            stall_timeout_s=info.stall_timeout_s,
            connect_timeout_s=info.connect_timeout_s,
            pool=old.pool if old is not None else None,
            checksums=info.checksums,
            record_chunks=info.record_chunks,
            observer=Observer("consumer", number, plan.identity, directory=info.stats_dir, metrics_port=port),
        )
        self._info, self._consumer, self._destination = info, consumer, destination
        if old is not None:
            old.close()

    def _check(self, info: RdtExecInitInfo) -> None:
        mistyped = {f.name: wrong for f in fields(info) if (wrong := _mistyped(f, getattr(info, f.name)))}
        wrong = list(mistyped.values())
        info = replace(info, **{name: getattr(_DEFAULTS, name) for name in mistyped})
        if self._redundant_experts() is not None:
            if self.parallel_config.eplb_config.use_async:
                wrong.append(
                    "eplb_config.use_async keeps copies of experts from before a sync and puts them into slots after "
                    "it, so old weights would come back: set it to false"
                )
            if info.compile_at:
                wrong.append(
                    "a plan that is compiled at init has the experts where vLLM starts, and EPLB moves them: with "
                    "enable_eplb give a plan file, and place its experts by --expert-placement"
                )
        if info.transport not in SETTINGS:
            wrong.append(f"transport must be one of {', '.join(SETTINGS)}, is {info.transport!r}")
        if info.checksums not in checksum.MODES:
            wrong.append(f"checksums must be one of {', '.join(checksum.MODES)}, is {info.checksums!r}")
        if info.compile_at and info.producers:
            wrong.append("producers and compile_at exclude each other")
        ranks = all(str(r).isdecimal() and _is_address(a) for r, a in info.producers.items())
        if not (info.producers or info.compile_at or "producers" in mistyped) or not ranks:
            wrong.append(f"producers must map trainer ranks to addresses, is {info.producers!r}")
        if info.compile_at and not _is_address(info.compile_at):
            wrong.append(f"compile_at must be an address, a path or [host, port], is {info.compile_at!r}")
        if info.num_replicas < 1 or not 0 <= info.replica_rank < info.num_replicas:
            wrong.append(f"replica_rank must be 0 to num_replicas - 1, is {info.replica_rank} of {info.num_replicas}")
        expected = info.num_replicas * self._topology(info).workers_per_replica
        if info.num_consumers not in (0, expected):
            wrong.append(f"num_consumers is {info.num_consumers}, the parallel config and num_replicas give {expected}")
        for name in ("stall_timeout_s", "connect_timeout_s"):
            if not 0 < getattr(info, name) < math.inf:
                wrong.append(f"{name} must be positive, is {getattr(info, name)}")
        if not 0 <= info.metrics_port < 1 << 16:
            wrong.append(f"metrics_port must be 0 to 65535, is {info.metrics_port}")
        if info.data_parallel_size < 0:
            wrong.append(f"data_parallel_size must be 0 or more, is {info.data_parallel_size}")
        try:
            bytes.fromhex(info.authkey)
        except ValueError:
            wrong.append("authkey must be hexadecimal")
        if wrong:
            known = ", ".join(f.name for f in fields(info))
            raise InputError("init info: " + "; ".join(wrong), fix=f"settings are {known}", code="RDT111")

    def _check_draft(self, info: RdtExecInitInfo, plan: WorkerPlan) -> bool:
        """Does the plan write the draft model too? PlanMismatch when it should and does not, or cannot."""
        planned = any(name.startswith(DRAFT) for name in plan.consumer.program.parameters.names)
        held = has_draft_model(self.vllm_config, self._position().pp)
        if planned and not held:
            raise PlanMismatch(
                "the plan writes a draft model, and this worker runs without speculative decoding",
                fix="compile without --speculative-config, or start the workers with one",
                code="RDT517",
            )
        if held and not planned and not info.keep_draft_model:
            method = self.vllm_config.speculative_config.method
            raise PlanMismatch(
                f"this worker holds a draft model (method {method!r}) that the plan does not write: "
                "the draft model would keep old weights, those that it started with",
                fix="compile with --speculative-config, or accept it with keep_draft_model=true in the init info",
                code="RDT517",
            )
        if planned and self._draft is None:
            raise PlanMismatch(
                "the plan writes the draft model, which vLLM has not shown to this engine",
                fix="before init_weight_transfer_engine call start_draft_weight_update and finish_weight_update once",
                code="RDT518",
            )
        return planned

    def set_weight_update_target(self, model: torch.nn.Module, model_config: Any) -> None:
        """vLLM shows the draft model: the update that now begins and ends is for that alone."""
        super().set_weight_update_target(model, model_config)
        self._draft = model

    @property
    def _is_shown(self) -> bool:
        """Is this vLLM's session for the draft model?"""
        return self.model is not self._default_model

    def _topology(self, info: RdtExecInitInfo) -> InferenceTopology:
        p = self.parallel_config
        independent = p.data_parallel_size == 1 and not self.vllm_config.model_config.is_moe
        engines = max(info.data_parallel_size, 1) if independent else p.data_parallel_size
        return InferenceTopology(
            p.tensor_parallel_size,
            p.pipeline_parallel_size,
            engines,
            p.enable_expert_parallel,
            redundant_experts=self._redundant_experts(),
        )

    def _redundant_experts(self) -> int | None:
        """Slots for experts beyond one for each, with EPLB; None: it is off."""
        p = self.parallel_config
        return p.eplb_config.num_redundant_experts if getattr(p, "enable_eplb", False) else None

    def _position(self) -> Position:
        p = self.parallel_config
        pp, tp = divmod(p.rank % (p.pipeline_parallel_size * p.tensor_parallel_size), p.tensor_parallel_size)
        return Position(p.data_parallel_index, pp, tp)

    def _compile_with_fleet(self, info: RdtExecInitInfo) -> RdtExecInitInfo:
        """Trace this worker for the plan that the trainer makes now; the init info that there is when it is made."""
        from rdtexec.live_compile import PROTOCOL, Standing, trace_for_fleet
        from rdtplan.trace.live import trace_worker

        position = self._position()
        producers = trace_for_fleet(
            _address(info.compile_at),
            Standing(PROTOCOL, evolve(self._topology(info), replicas=info.num_replicas), info.replica_rank, position),
            lambda manifest: trace_worker(self.vllm_config, manifest, position),
            authkey=bytes.fromhex(info.authkey),
            connect_timeout_s=info.connect_timeout_s,
            stall_timeout_s=info.stall_timeout_s,
        )
        return replace(info, producers=producers, compile_at="")

    def _load_plan(self, info: RdtExecInitInfo) -> WorkerPlan:
        """This worker's part, of a plan made for the layout that runs."""
        topology, position = self._topology(info), self._position()
        index = (position.dp * topology.pipeline_parallel + position.pp) * topology.tensor_parallel + position.tp
        consumer_id = info.replica_rank * topology.workers_per_replica + index
        digest = info.plan if _DIGEST.fullmatch(info.plan) else ""
        with tempfile.TemporaryDirectory(prefix="rdtexec-") as scratch:
            path = Path(info.plan)
            if digest or not info.plan:
                path = Path(scratch) / "fleet.plan"
                producers = _producers(info)
                address, authkey = producers[min(producers)], bytes.fromhex(info.authkey)
                path.write_bytes(fetch_plan(address, authkey=authkey, timeout_s=info.connect_timeout_s))
            target = live_target()
            plan = load_worker(path, consumer_id, position=position, replica=info.replica_rank, target=target)
        if digest and not plan.identity.startswith(digest):
            raise PlanMismatch(
                f"this worker was told to run plan {digest}, the producers have {plan.identity}",
                fix="give both ends the same plan",
                code="RDT505",
            )
        eplb = [
            "without EPLB" if redundant is None else f"with EPLB and {redundant} redundant experts"
            for redundant in (plan.topology.redundant_experts, topology.redundant_experts)
        ]
        if eplb[0] != eplb[1]:
            raise PlanMismatch(
                f"the plan is for workers {eplb[0]}, this one runs {eplb[1]}: its experts are in other slots",
                fix="compile it with --redundant-experts as the workers run, or without where enable_eplb is off",
                code="RDT519",
            )
        planned = evolve(plan.topology, replicas=1)
        if planned != topology or plan.topology.replicas != info.num_replicas:
            raise PlanMismatch(
                f"the plan is for {plan.topology}, this fleet is {topology} with {info.num_replicas} replicas",
                fix="compile the plan for the parallel sizes that run",
                code="RDT502",
            )
        return plan

    def start_weight_update(self) -> None:
        """Put the model into checkpoint format; after a failed sync connect anew first.

        PlanMismatch RDT519, and the model serves on, when EPLB has moved experts since.
        """
        if self._is_shown:
            return
        consumer, destination = self._active()
        destination.check()
        if consumer.failed:
            assert self._info is not None
            LOG.warning("connecting anew: %s", consumer.failed)
            destination.abandon()
            self._connect(self._info, consumer.plan, destination)
        destination.begin()
        self._synced = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Execute one sync. No device synchronization: the sync itself ends when its last module is complete."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RdtExecUpdateInfo) -> None:
        """Execute one sync, or abandon the update; TransferError names what failed, RDT632 says that it was abandoned.

        A sync that is refused before anything moved leaves the model serving from the weights it had.
        """
        if self._is_shown:
            raise InputError(
                "the draft model is written by the update of the model, and not by one of its own",
                fix="call start_weight_update",
                code="RDT119",
            )
        consumer, destination = self._active()
        if update_info.abandon:
            destination.abandon()
            what = "nothing was written in it"
            if self._synced:
                what = self._mixed = "its sync was done, and it was not finished"
            raise TransferError(
                f"this update was abandoned by the trainer: {what}",
                fix="nothing here: the trainer says why",
                code="RDT632",
            )
        try:
            destination.check()
            self.last_report = consumer.sync(update_info.sync_idx)
            self._synced, self._mixed = True, ""
        except BaseException:
            if consumer.failed:
                self._mixed = consumer.failed
            else:
                destination.abandon()
            raise

    def finish_weight_update(self) -> None:
        """Leave checkpoint format: every module serves from its kernel tensors again.

        An update in which no sync was done leaves the weights as they were. TransferError RDT605 after a failed sync,
        in whatever update it was: finishing would serve a mixture of old and new weights.
        """
        if self._is_shown:
            return
        _, destination = self._active()
        if self._mixed:
            raise TransferError(
                f"this update cannot be finished: {self._mixed}",
                fix="do a sync, which writes the whole model, or end the update by update_weights with abandon=true",
                code="RDT605",
            )
        if self._synced:
            destination.finish()
        else:
            destination.abandon()

    def _active(self) -> tuple[Consumer, LayerwiseDestination]:
        if self._consumer is None or self._destination is None:
            raise TransferError(
                "this worker has no transfer engine yet", fix="call init_weight_transfer_engine first", code="RDT605"
            )
        return self._consumer, self._destination

    def shutdown(self) -> None:
        """Disconnect and release."""
        if self._consumer is not None:
            self._consumer.close()
        self._consumer = self._destination = self._info = None


_DEFAULTS = RdtExecInitInfo()


def _mistyped(of: Field[Any], value: Any) -> str:
    """What is wrong with the type of a setting, as JSON gives it; '' when nothing is."""
    types: dict[Any, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
    wanted = types.get(of.type, (dict,) if of.name == "producers" else (object,))
    is_bool = isinstance(value, bool) and bool not in wanted and object not in wanted
    if isinstance(value, wanted) and not is_bool:
        return ""
    return f"{of.name} must be {' or '.join(t.__name__ for t in wanted)}, is {value!r}"


def _is_address(value: Any) -> bool:
    """A path, or [host, port] as JSON has it."""
    if isinstance(value, str):
        return bool(value)
    pair = isinstance(value, (list, tuple)) and len(value) == 2
    return pair and isinstance(value[0], str) and type(value[1]) is int and 0 < value[1] < 1 << 16


def _producers(info: RdtExecInitInfo) -> dict[int, Address]:
    return {int(rank): _address(a) for rank, a in info.producers.items()}


def _address(value: Any) -> Address:
    """JSON has no tuples."""
    return value if isinstance(value, str) else (str(value[0]), int(value[1]))
