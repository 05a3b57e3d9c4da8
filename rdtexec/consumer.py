"""The consumer: one worker's end of a sync. Pulls by the lane scheduler, scatters behind it, signals frees, counts.

A sync succeeds only when every planned chunk was scattered and completed, every free signal was sent, and the producers
said that all other consumers of the sync are as far. After a failure the parameters are partly new and partly old; the
consumer says so, tells the producers, disconnects, and refuses further syncs. A new consumer, which may take over the
receive pool, can then connect and write the whole model.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait

import torch
from attrs import evolve, frozen

from rdtexec import checksum, schedule
from rdtexec.control import Address, Link, Message, dial
from rdtexec.destination import Destination
from rdtexec.plans import WorkerPlan, chunk_keys
from rdtexec.pool import PoolGeometry, ReceivePool, Slot
from rdtexec.producer import PROTOCOL
from rdtexec.reports import LOG, Observer, SyncReport, peak_memory
from rdtexec.scatter import ModuleHooks, Scatterer, ScatterJob
from rdtexec.schedule import Pull
from rdtexec.transport import CONSUMERS, allowed
from rdtexec.transport.base import ConsumerTransport, ReadFailed
from rdtexec.transport.local import node
from rdtplan.errors import RdtError, TransferError

CONNECT_TIMEOUT_S = 60.0
GRACE = 1.25
"""A consumer waits this much longer than a producer, who knows for whom the fleet waits and should speak first."""
GIVE_UP_S = 30.0
"""How long a failed sync waits for the copies under way: nothing writes to the model after it was reported."""
GONE_S = 1.0
"""How long a READ that failed waits for the producer's connection to close: a process that dies closes one by one."""
SETTLE_S = 1.0
"""How long a failed sync looks after its reads: what has landed writes no more, and the pool can be used again."""
POLL_S = 0.0005
"""How often transfers under way are looked at while no message comes."""


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
        transport: str,
        producers: Mapping[int, Address],
        *,
        authkey: bytes,
        hooks: ModuleHooks | None = None,
        stall_timeout_s: float = 300.0,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        pool: ReceivePool | None = None,
        checksums: str = "off",
        record_chunks: bool = False,
        observer: Observer | None = None,
    ) -> None:
        """Allocate, register and connect. All or nothing: a failure gives back what was taken.

        `transport` is a setting: `auto` lets each producer choose what suits the pair. `producers` maps trainer ranks
        to addresses; every rank that owns part of a gather group must be among them. `pool` is that of an earlier
        consumer, to be used again; TransferError RDT618 when the plan needs another. With `checksums` full, a sync in
        which the producers proved fewer chunks than there are fails.
        """
        self.plan, self._destination = plan, destination
        self._stall_timeout_s = stall_timeout_s * GRACE
        self._program = plan.consumer.program
        self._me = plan.consumer.consumer_id
        self._streams = schedule.streams_of(self._program.chunks.stream)
        self._lanes = max(1, min(plan.settings.stages_in_flight, len(self._streams)))
        self._slots = plan.settings.num_rdt_buffers
        self._owners = plan.owners_of_group
        self._first_of_chunk, self._last_of_chunk = _by_chunk(plan)
        self._checksums, self._record_chunks = checksums, record_chunks
        self._observer = observer or Observer("consumer", self._me, plan.identity)
        self._pool = pool
        if pool is not None:
            self._check_pool(pool)
            self._pool = pool.renewed()
        self._transports: dict[str, ConsumerTransport] = {}
        self._uses: dict[int, ConsumerTransport] = {}
        """Transport of each producer that this worker pulls from."""
        self._read_in_place: frozenset[int] = frozenset()
        """Gather groups of which some chunk is copied straight from its producer's memory."""
        self._links: dict[int, Link] = {}
        self._scatterer = Scatterer(destination.device, _FillThenHooks(hooks or NoHooks(), destination))
        self._syncs = 0
        self._failed = ""
        self._closed = False
        try:
            self._connect(producers, list(allowed(transport)), authkey, connect_timeout_s)
        except BaseException:
            self._failed = "it never connected"
            self.close()
            raise

    def _check_pool(self, pool: ReceivePool) -> None:
        have, wanted = pool.geometry, self._pool_geometry()
        if evolve(have, slot_nbytes=0) != evolve(wanted, slot_nbytes=0) or have.slot_nbytes < wanted.slot_nbytes:
            raise TransferError(
                f"consumer {self._me} runs with {have}; this plan needs {wanted}",
                fix="keep num_rdt_buffers, stages_in_flight, staging_device and the chunk size, or restart the worker",
                code="RDT618",
            )

    def _pool_geometry(self) -> PoolGeometry:
        return PoolGeometry(self._lanes, self._slots, self.plan.slot_nbytes, self.plan.settings.staging_device)

    def _connect(
        self, producers: Mapping[int, Address], transports: list[str], authkey: bytes, timeout_s: float
    ) -> None:
        pairs = dict(self.plan.consumer.routing.pair_digests)
        needed = sorted({r for owners in self._owners for r in owners})
        missing = [r for r in needed if r not in producers]
        if missing:
            raise TransferError(
                f"consumer {self._me} needs producers {needed}, no address was given for {missing}", code="RDT604"
            )
        for rank in needed:
            self._links[rank] = dial(producers[rank], f"producer {rank}", authkey=authkey, timeout_s=timeout_s)
            self._greet(rank, transports, pairs.get(rank))
        for rank in needed:
            answer = self._answer(rank, "welcome", timeout_s)
            if rank not in pairs:
                continue
            try:
                self._use(rank, answer)
            except TransferError as error:
                others = [name for name in transports if name != answer["transport"]]
                if error.code != "RDT613" or not others:
                    raise
                LOG.warning("consumer %d uses %s with producer %d: %s", self._me, others[0], rank, error.message)
                self._greet(rank, others, pairs[rank])
                self._use(rank, self._answer(rank, "welcome", timeout_s))
        chunks, producer = self._program.chunks, self.plan.consumer.routing.producer
        in_place = {rank for rank, transport in self._uses.items() if not transport.frees_on_landing}
        self._read_in_place = frozenset(g for g, rank in zip(chunks.group, producer, strict=True) if rank in in_place)
        for rank in needed:  # only now give up an earlier connection of this consumer, if there is one
            self._links[rank].send("commit")
        for rank in needed:
            self._answer(rank, "committed", timeout_s)

    def _greet(self, rank: int, transports: list[str], pair: str | None) -> None:
        self._links[rank].send(
            "hello",
            protocol=PROTOCOL,
            consumer=self._me,
            transports=transports,
            node=node(),
            device=self._destination.device.type,
            plan=self.plan.identity,
            pair=pair,
        )

    def _use(self, rank: int, welcome: Message) -> None:
        """Take the transport that a producer chose for the pair."""
        transport = self._transport(welcome["transport"])
        transport.connect(rank, welcome["facts"])
        self._uses[rank] = transport

    def _transport(self, name: str) -> ConsumerTransport:
        found = self._transports.get(name)
        if found is None:
            found = CONSUMERS[name]()
            if found.needs_slots and self._pool is None:
                self._pool = ReceivePool(self._pool_geometry(), self._destination.device)
            found.attach(self.plan, self._destination, self._pool)
            self._transports[name] = found
        return found

    def transport_of(self, producer: int) -> str:
        """The transport that moves what comes from `producer`."""
        return self._uses[producer].name

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
                fix=answer.get("fix") or "both ends must load the same plan file, and each the part of its own rank",
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
            self._scatterer.cancel(GIVE_UP_S)
            for link in self._links.values():
                with contextlib.suppress(RdtError):
                    link.send("failed", sync=number, reason=f"consumer {self._me}: {reason}", waits=run.waits)
                link.close()
            self._settle()
            self._observer.failed(number, error)
            raise
        self._syncs += 1
        self._observer.succeeded(report)
        return report

    def _settle(self) -> None:
        """Look after the transfers of a failed sync until they have landed, or will not in time."""
        deadline = time.monotonic() + SETTLE_S
        while any(t.inflight for t in self._transports.values()) and time.monotonic() < deadline:
            for transport in self._transports.values():
                with contextlib.suppress(ReadFailed):
                    transport.poll()
            time.sleep(POLL_S)

    @property
    def failed(self) -> str:
        """Why the model may be partly overwritten and no sync is possible any more; empty as long as all is well."""
        return self._failed

    @property
    def pool(self) -> ReceivePool | None:
        """The receive pool, for the next consumer of this worker; None when there is none to be had.

        A pool that a transfer may still write to, or that a stuck thread may still read, stays with this consumer.
        """
        return None if self._poisoned else self._pool

    @property
    def _poisoned(self) -> bool:
        return any(t.inflight for t in self._transports.values() if t.needs_slots) or self._scatterer.stuck

    def close(self) -> None:
        """Drain, stop the threads (30 s at most), release memory. What may still be written to stays parked."""
        if self._closed:
            return
        self._closed = True
        self._scatterer.close()
        for link in self._links.values():
            link.close()
        poisoned = self._poisoned
        for transport in self._transports.values():
            transport.close(poisoned=poisoned)


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
        self._proofs: dict[int, str] = {}
        self._checked = 0
        self._began = time.perf_counter()
        self._times: dict[int, list[float]] = {}
        """Chunk -> issued, ready, landed, scattered, in seconds since the sync began."""
        self._transfer_s = 0.0
        self._done: set[int] = set()
        """Producers that said that all consumers are complete."""
        self._counting = threading.Lock()
        self._scattered = 0
        self._signals = 0
        self._last_event = time.monotonic()
        self._wait_s = 0.0
        self.waits = ""
        """When a producer gave up waiting: what this consumer itself waited for, and from whom."""

    def execute(self) -> SyncReport:
        c = self._c
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
        self._check_complete()
        c._destination.check()
        for link in c._links.values():
            link.send("complete", sync=self._number)
        self._await_everybody()
        return self._report()

    def _await_everybody(self) -> None:
        """Until every producer has said that all consumers are complete: then all report success, or none does."""
        started = time.perf_counter()
        deadline = time.monotonic() + self._c._stall_timeout_s
        while missing := [rank for rank in self._c._links if rank not in self._done]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferError(
                    f"sync {self._number} of consumer {self._c._me} is complete, but producers {missing[:8]} did not "
                    f"say within {self._c._stall_timeout_s:.1f} s that the others are",
                    fix="look at the producers named, and at the consumers that they wait for",
                    code="RDT602",
                )
            self._receive(left)
        self._wait_s += time.perf_counter() - started

    def _check_complete(self) -> None:
        c = self._c
        planned = len(self._program.chunks)
        wanted = sum(len(owners) for owners in c._owners)
        if self._scattered != planned or self._signals != wanted:
            raise TransferError(
                f"sync {self._number} of consumer {c._me}: {self._scattered} of {planned} chunks were scattered and "
                f"{self._signals} of {wanted} free signals sent",
                code="RDT622",
            )
        if c._checksums == "full" and self._checked != planned:
            raise TransferError(
                f"sync {self._number} of consumer {c._me}: {self._checked} of {planned} chunks were proved by checksum",
                fix="set checksums=full on every trainer rank",
                code="RDT622",
            )

    def _report(self) -> SyncReport:
        c = self._c
        return SyncReport(
            sync=self._number,
            pulls=len(self._program.chunks),
            bytes=sum(self._program.chunks.nbytes),
            seconds=time.perf_counter() - self._began,
            wait_s=self._wait_s,
            transfer_s=self._transfer_s,
            scatter_s=c._scatterer.scatter_s,
            complete_s=c._scatterer.complete_s,
            peak_memory=peak_memory(c._destination.device),
            checked=self._checked,
            chunks=tuple((chunk, t[0], t[1], t[2], t[3]) for chunk, t in sorted(self._times.items()))
            if c._record_chunks
            else (),
        )

    def _note(self, chunk: int) -> float:
        """The next moment in the life of a chunk."""
        now = time.perf_counter() - self._began
        self._times.setdefault(chunk, []).append(now)
        return now

    # -- effects -------------------------------------------------------------------------------------------------------

    def _slot(self, lane: int, slot: int) -> Slot | None:
        return self._c._pool.slots[lane][slot] if self._c._pool else None

    def slot_free(self, lane: int, slot: int) -> bool:
        found = self._slot(lane, slot)
        return found is None or found.free()

    def issue(self, pull: Pull) -> None:
        self._issued[pull.chunk] = (pull, time.monotonic())
        self._note(pull.chunk)
        self._link(pull.chunk).send("pull", sync=self._number, chunk=pull.chunk)
        self._last_event = time.monotonic()

    def landed(self, pull: Pull) -> bool:
        return pull in self._landed

    def drain(self, pull: Pull) -> None:
        chunk, c = pull.chunk, self._c
        self._landed.discard(pull)
        del self._issued[chunk]
        transport = c._uses[self._routing.producer[chunk]]
        proof = self._proofs.pop(chunk, None)
        # Chunks of a group are scattered in the order of their drain, so after the last all others are out as well.
        landed = self._program.chunks.group[chunk] not in c._read_in_place
        job = ScatterJob(
            label=c.plan.chunk_label(chunk),
            copies=transport.copies(pull),
            first=c._first_of_chunk.get(chunk, ()),
            last=c._last_of_chunk.get(chunk, ()),
            slot=self._slot(pull.lane, pull.slot) if transport.needs_slots else None,
            check=None if proof is None else lambda written: self._check(chunk, proof, written),
            done=lambda: self._after_scatter(chunk, landed),
        )
        c._scatterer.submit(job)
        if landed:
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
                reading = any(t.inflight for t in c._transports.values())
                if self._receive(POLL_S if reading else left):
                    self._take_landed()
                    return
        finally:
            self._wait_s += time.perf_counter() - started

    def _take_landed(self) -> bool:
        try:
            found = [pull for transport in self._c._transports.values() for pull in transport.poll()]
        except ReadFailed as error:
            raise self._culprit(error) from error
        for pull in found:
            self._transfer_s += self._note(pull.chunk) - self._times[pull.chunk][1]
            if self._c._observer.verbose:
                self._c._observer.chunk("landed", self._number, self._c.plan.chunk_label(pull.chunk))
        if found:
            self._landed.update(found)
            self._last_event = time.monotonic()
        return bool(found)

    def _receive(self, timeout_s: float) -> bool:
        """Handle the messages that are there; False when none came in time."""
        links = {link.connection: (rank, link) for rank, link in self._c._links.items() if rank not in self._done}
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
            if message.get("sync") != self._number:
                return  # of a sync that this consumer has behind it
            if message.get("code") == "RDT602":  # who gave up first does not know whom the others wait for
                self._say_what_for(rank)
            said = f"; {self.waits}" if self.waits else ""
            raise TransferError(f"sync {self._number}: {message.get('reason')}{said}", code="RDT606")
        if kind == "done" and message.get("sync") == self._number:
            self._done.add(rank)
            return
        chunk = message.get("chunk")
        if kind != "ready" or message.get("sync") != self._number or chunk not in self._issued:
            raise TransferError(
                f"producer {rank} sent {kind!r} for sync {message.get('sync')} chunk {chunk}, which consumer "
                f"{self._c._me} did not ask for in sync {self._number}",
                code="RDT603",
            )
        if "checksum" in message:
            self._proofs[chunk] = str(message["checksum"])
        self._note(chunk)
        try:
            self._c._uses[rank].begin_read(self._issued[chunk][0], rank, message["facts"])
        except ReadFailed as error:
            raise self._culprit(error) from error

    def _culprit(self, failure: ReadFailed) -> TransferError:
        """The producer's death, or what it says went wrong, where that is why a READ failed; else the failure itself.

        The network often sees a death before the control connection does.
        """
        link, deadline = self._c._links[failure.producer], time.monotonic() + GONE_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                message = link.receive(left)
                if message is not None and message["kind"] == "failed":
                    self._handle(failure.producer, message)
            except TransferError as cause:
                return TransferError(f"{cause.message}; before that, {failure.message}", fix=cause.fix, code=cause.code)
        return failure

    def _say_what_for(self, but: int) -> None:
        """Put into words which producer, besides `but`, owes this consumer something."""
        producer, now = self._routing.producer, time.monotonic()
        silent = [(since, c) for c, (_, since) in self._issued.items() if len(self._times[c]) == 1]
        owed = [(since, c) for since, c in silent if producer[c] != but]
        missing = [rank for rank in self._c._links if rank not in self._done and rank != but]
        if owed:
            since, chunk = min(owed)
            what = f"for {self._c.plan.chunk_label(chunk)} of producer {producer[chunk]}, asked {now - since:.1f} s ago"
        elif not self._issued and missing and self._signals == sum(len(owners) for owners in self._c._owners):
            what = f"for producers {missing[:8]} to say that all models are complete"
        else:
            return
        self.waits = f"consumer {self._c._me} itself waits {what}"

    def _check(self, chunk: int, proof: str, written: Sequence[torch.Tensor]) -> None:
        """Hold what was written to what the producer's source holds. Runs in the scatter thread."""
        found = checksum.digest(written)
        if found != proof:
            c = self._c
            keys = chunk_keys(self._program, chunk)
            names = [c.plan.manifest.names[self._program.keys.source[k]] for k in keys]
            raise TransferError(
                f"sync {self._number} of consumer {c._me}: {c.plan.chunk_label(chunk)} arrived with other bytes than "
                f"producer {self._routing.producer[chunk]} holds: checksum {proof} there, {found} here; it carries "
                f"{names[0]!r} and {len(set(names)) - 1} more names",
                fix="a transfer or the memory of one of the two processes is faulty; do not serve from this model",
                code="RDT623",
            )
        with self._counting:
            self._checked += 1

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

    def _after_scatter(self, chunk: int, freed: bool) -> None:
        with self._counting:
            self._scattered += 1
            self._note(chunk)
        if not freed:
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
