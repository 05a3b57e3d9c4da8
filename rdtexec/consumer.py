"""The consumer: one worker's end of a sync. Pulls by the lane scheduler, scatters behind it, signals frees, counts.

A sync succeeds only when every planned chunk was scattered and completed and every free signal was sent. After a
failure the parameters are partly new and partly old; the consumer says so, tells the producers, and refuses further
syncs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import wait

from attrs import frozen

from rdtexec import schedule
from rdtexec.control import Address, Link, Message, dial
from rdtexec.destination import Destination
from rdtexec.plans import WorkerPlan
from rdtexec.pool import ReceivePool, Slot
from rdtexec.producer import PROTOCOL
from rdtexec.scatter import ModuleHooks, Scatterer, ScatterJob
from rdtexec.schedule import Pull
from rdtexec.transport.base import ConsumerTransport
from rdtplan.errors import RdtError, TransferError

CONNECT_TIMEOUT_S = 60.0
GRACE = 1.25
"""A consumer waits this much longer than a producer, who knows for whom the fleet waits and should speak first."""
POLL_S = 0.0005
"""How often transfers under way are looked at while no message comes."""


@frozen
class SyncReport:
    """One sync as a consumer saw it."""

    sync: int
    pulls: int
    nbytes: int
    """Packed bytes of all chunks."""
    seconds: float
    wait_s: float
    """Seconds spent waiting for producers and slots."""
    scatter_s: float
    complete_s: float


class NoHooks:
    """Modules whose memory is there and needs no post-processing."""

    def materialize(self, module: int) -> None:
        return None

    def complete(self, module: int) -> None:
        return None


@frozen
class _FillThenHooks:
    """Materialize a module, then write its constants; do its local operations before it is completed."""

    hooks: ModuleHooks
    destination: Destination

    def materialize(self, module: int) -> None:
        self.hooks.materialize(module)
        self.destination.fill(module)

    def complete(self, module: int) -> None:
        self.destination.evaluate(module)
        self.hooks.complete(module)


class Consumer:
    """The runtime of one worker: connect once, then `sync` again and again."""

    def __init__(
        self,
        plan: WorkerPlan,
        destination: Destination,
        transport: ConsumerTransport,
        producers: Mapping[int, Address],
        *,
        authkey: bytes,
        hooks: ModuleHooks | None = None,
        stall_timeout_s: float = 300.0,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Allocate, register and connect. All or nothing: a failure gives back what was taken.

        `producers` maps trainer ranks to addresses; every rank that owns part of a gather group must be among them.
        """
        self.plan, self._destination, self._transport = plan, destination, transport
        self._stall_timeout_s = stall_timeout_s * GRACE
        self._program = plan.consumer.program
        self._me = plan.consumer.consumer_id
        self._streams = schedule.streams_of(self._program.chunks.stream)
        self._lanes = max(1, min(plan.settings.stages_in_flight, len(self._streams)))
        self._slots = plan.settings.num_rdt_buffers
        self._owners = plan.owners_of_group
        self._first_of_chunk, self._last_of_chunk = _by_chunk(plan)
        self._pool: ReceivePool | None = None
        if transport.needs_slots:
            self._pool = ReceivePool(self._lanes, self._slots, plan.slot_nbytes, destination.device)
        self._links: dict[int, Link] = {}
        self._scatterer = Scatterer(destination.device, _FillThenHooks(hooks or NoHooks(), destination))
        self._syncs = 0
        self._failed = ""
        self._closed = False
        try:
            transport.attach(plan, destination, self._pool)
            self._connect(producers, authkey, connect_timeout_s)
        except BaseException:
            self._failed = "it never connected"
            self.close()
            raise

    def _connect(self, producers: Mapping[int, Address], authkey: bytes, timeout_s: float) -> None:
        pairs = dict(self.plan.consumer.routing.pair_digests)
        needed = sorted({r for owners in self._owners for r in owners})
        missing = [r for r in needed if r not in producers]
        if missing:
            raise TransferError(
                f"consumer {self._me} needs producers {needed}, no address was given for {missing}", code="RDT604"
            )
        for rank in needed:
            link = self._links[rank] = dial(producers[rank], f"producer {rank}", authkey=authkey, timeout_s=timeout_s)
            link.send(
                "hello",
                protocol=PROTOCOL,
                consumer=self._me,
                transport=self._transport.name,
                plan=self.plan.identity,
                pair=pairs.get(rank),
                facts=self._transport.hello(),
            )
        for rank in needed:
            answer = self._answer(rank, "welcome", timeout_s)
            self._transport.connect(rank, answer["facts"])
        for rank in needed:  # only now give up an earlier connection of this consumer, if there is one
            self._links[rank].send("commit")
        for rank in needed:
            self._answer(rank, "committed", timeout_s)

    def _answer(self, rank: int, kind: str, timeout_s: float) -> Message:
        answer = self._links[rank].receive(timeout_s)
        if answer is None:
            raise TransferError(
                f"producer {rank} accepted the connection of consumer {self._me} "
                f"but did not answer in {timeout_s:.0f} s",
                fix="look whether that producer is stopped",
                code="RDT602",
            )
        if answer["kind"] != kind or answer.get("rank", rank) != rank:
            raise TransferError(
                f"producer {rank} refused consumer {self._me}: {answer.get('reason') or answer}",
                fix="both ends must load the same plan file, and each the part of its own rank",
                code="RDT608",
            )
        return answer

    def sync(self, sync_idx: int) -> SyncReport:
        """Transfer the whole model once. `sync_idx` is the trainer's number of this sync; -1 means the next one.

        TransferError names what failed; the model is then not usable and neither is this consumer.
        """
        if self._failed or self._closed:
            raise TransferError(
                f"consumer {self._me} cannot sync: {self._failed or 'it was closed'}",
                fix="make a new consumer, and reload the model before serving from it",
                code="RDT605",
            )
        if type(sync_idx) is not int or sync_idx < -1:
            raise TransferError(f"sync_idx must be an int of -1 or more, is {sync_idx!r}", code="RDT609")
        number = self._syncs if sync_idx == -1 else sync_idx
        run = _Sync(self, number)
        try:
            report = run.execute()
        except BaseException as error:
            reason = error.message if isinstance(error, RdtError) else f"{type(error).__name__}: {error}"
            self._failed = f"sync {number} failed ({reason}), the model is partly overwritten"
            for link in self._links.values():
                with contextlib.suppress(RdtError):
                    link.send("failed", reason=f"consumer {self._me}: {reason}")
            raise
        self._syncs += 1
        return report

    @property
    def failed(self) -> str:
        """Why the model may be partly overwritten and no sync is possible any more; empty as long as all is well."""
        return self._failed

    def close(self) -> None:
        """Drain, stop the threads (30 s at most), release memory. After a failure memory stays parked."""
        if self._closed:
            return
        self._closed = True
        stopped = self._scatterer.close()
        for link in self._links.values():
            link.close()
        if hasattr(self._transport, "_plan"):
            self._transport.close(poisoned=bool(self._failed) or not stopped)


def _by_chunk(plan: WorkerPlan) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
    """Modules to materialize before, and to complete after, each chunk."""
    first: dict[int, list[int]] = {}
    last: dict[int, list[int]] = {}
    lifetimes = plan.consumer.program.lifetimes
    for module, a, b in zip(lifetimes.module, lifetimes.first, lifetimes.last, strict=True):
        first.setdefault(a, []).append(module)
        last.setdefault(b, []).append(module)
    return {c: tuple(m) for c, m in first.items()}, {c: tuple(m) for c, m in last.items()}


class _Sync:
    """One sync under way: the effects that the scheduler runs on."""

    def __init__(self, consumer: Consumer, number: int) -> None:
        self._c = consumer
        self._number = number
        self._program = consumer.plan.consumer.program
        self._routing = consumer.plan.consumer.routing
        self._issued: dict[int, tuple[Pull, float]] = {}
        self._landed: set[Pull] = set()
        self._counting = threading.Lock()
        self._scattered = 0
        self._signals = 0
        self._last_event = time.monotonic()
        self._wait_s = 0.0

    def execute(self) -> SyncReport:
        c = self._c
        started = time.perf_counter()
        c._scatterer.reset()
        c._destination.fill(None)
        c._destination.evaluate(None)
        for group, after in enumerate(self._program.free_after):
            if after == -1:
                self._free(group)
        serial = c._syncs == 0
        schedule.run(
            c._streams,
            lanes=1 if serial else c._lanes,
            window=1 if serial else c._slots,
            slots=c._slots,
            effects=self,
        )
        c._scatterer.drain(c._stall_timeout_s)
        planned = len(self._program.chunks)
        wanted = sum(len(owners) for owners in c._owners)
        if self._scattered != planned or self._signals != wanted:
            raise TransferError(
                f"sync {self._number} of consumer {c._me}: {self._scattered} of {planned} chunks were scattered and "
                f"{self._signals} of {wanted} free signals sent",
                code="RDT622",
            )
        return SyncReport(
            sync=self._number,
            pulls=planned,
            nbytes=sum(self._program.chunks.nbytes),
            seconds=time.perf_counter() - started,
            wait_s=self._wait_s,
            scatter_s=c._scatterer.scatter_s,
            complete_s=c._scatterer.complete_s,
        )

    # -- effects -------------------------------------------------------------------------------------------------------

    def _slot(self, lane: int, slot: int) -> Slot | None:
        return self._c._pool.slots[lane][slot] if self._c._pool else None

    def slot_free(self, lane: int, slot: int) -> bool:
        found = self._slot(lane, slot)
        return found is None or found.free()

    def issue(self, pull: Pull) -> None:
        self._issued[pull.chunk] = (pull, time.monotonic())
        self._link(pull.chunk).send("pull", sync=self._number, chunk=pull.chunk)
        self._last_event = time.monotonic()

    def landed(self, pull: Pull) -> bool:
        return pull in self._landed

    def drain(self, pull: Pull) -> None:
        chunk, c = pull.chunk, self._c
        self._landed.discard(pull)
        del self._issued[chunk]
        job = ScatterJob(
            label=c.plan.chunk_label(chunk),
            copies=c._transport.copies(pull),
            first=c._first_of_chunk.get(chunk, ()),
            last=c._last_of_chunk.get(chunk, ()),
            slot=self._slot(pull.lane, pull.slot),
            done=lambda: self._after_scatter(chunk),
        )
        c._scatterer.submit(job)
        if c._transport.frees_on_landing:
            self._free_after(chunk)

    def wait(self, timeout_s: float | None) -> None:
        """Until something happened: a message, a landed transfer, a freed slot; or until the deadline, which raises."""
        c = self._c
        started = time.perf_counter()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                c._scatterer.check()
                if self._take_landed():
                    return
                left = self._last_event + c._stall_timeout_s - time.monotonic()
                if left <= 0:
                    raise self._stalled()
                if until is not None:
                    left = min(left, until - time.monotonic())
                    if left <= 0:
                        return
                if not self._issued and c._pool is not None:
                    with c._pool.changed:
                        c._pool.changed.wait(min(left, schedule.RECHECK_S))
                    return
                if self._receive(POLL_S if c._transport.reading else left):
                    self._take_landed()
                    return
        finally:
            self._wait_s += time.perf_counter() - started

    def _take_landed(self) -> bool:
        found = self._c._transport.poll()
        if found:
            self._landed.update(found)
            self._last_event = time.monotonic()
        return bool(found)

    def _receive(self, timeout_s: float) -> bool:
        """Handle the messages that are there; False when none came in time."""
        links = {link.connection: (rank, link) for rank, link in self._c._links.items()}
        ready = wait(list(links), min(timeout_s, 1.0))
        for connection in ready:
            rank, link = links[connection]  # type: ignore[index]
            message = link.receive(0)
            if message is not None:
                self._handle(rank, message)
                self._last_event = time.monotonic()
        return bool(ready)

    def _handle(self, rank: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "failed":
            raise TransferError(f"sync {self._number}: {message.get('reason')}", code="RDT606")
        chunk = message.get("chunk")
        if kind != "ready" or message.get("sync") != self._number or chunk not in self._issued:
            raise TransferError(
                f"producer {rank} sent {kind!r} for sync {message.get('sync')} chunk {chunk}, which consumer "
                f"{self._c._me} did not ask for in sync {self._number}",
                code="RDT603",
            )
        self._c._transport.begin_read(self._issued[chunk][0], rank, message["facts"])

    def _stalled(self) -> TransferError:
        c = self._c
        if not self._issued:
            return TransferError(
                f"sync {self._number} of consumer {c._me}: no receive slot became free for {c._stall_timeout_s:.1f} s",
                fix="the scatter is stuck; look at the device of this worker",
                code="RDT602",
            )
        chunk, (_, since) = min(self._issued.items(), key=lambda item: item[1][1])
        return TransferError(
            f"sync {self._number} of consumer {c._me}: nothing arrived for {c._stall_timeout_s:.1f} s; "
            f"{c.plan.chunk_label(chunk)} was asked of producer {self._routing.producer[chunk]} "
            f"{time.monotonic() - since:.1f} s ago",
            fix="look whether that producer is stopped or its gather hangs; raise stall_timeout_s if it is only slow",
            code="RDT602",
        )

    # -- signals -------------------------------------------------------------------------------------------------------

    def _link(self, chunk: int) -> Link:
        return self._c._links[self._routing.producer[chunk]]

    def _after_scatter(self, chunk: int) -> None:
        with self._counting:
            self._scattered += 1
        if not self._c._transport.frees_on_landing:
            self._free_after(chunk)

    def _free_after(self, chunk: int) -> None:
        group = self._program.chunks.group[chunk]
        if self._program.free_after[group] == chunk:
            self._free(group)

    def _free(self, group: int) -> None:
        for rank in self._c._owners[group]:
            self._c._links[rank].send("free", sync=self._number, group=group)
            with self._counting:
                self._signals += 1
