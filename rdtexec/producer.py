"""The producer: gathers group by group in plan order, publishes, serves pulls, and frees when the last signal came.

Two threads share one lock. The caller's thread runs `sync`: it gathers (which may be a collective), publishes, and
waits for credit. The control thread owns the sockets: it accepts consumers, takes their pulls and free signals, packs
and answers. All decisions are in `ServeState`; this file only carries them out.

A failed sync ends with every consumer told why. The producer itself can go on: the next sync waits until every consumer
that is to take part is connected, those that failed anew, and begins from nothing. So a restarted worker can rejoin
between two syncs, and a sync can be run with those that are left, with no word between trainer ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Protocol

import torch

from rdtexec import checksum, payload
from rdtexec.control import Address, Link, Message, listen, send_bytes, stop_welcoming, welcome_forever
from rdtexec.destination import strided, typed
from rdtexec.device import with_index
from rdtexec.plans import TrainerPlan, chunk_scatters
from rdtexec.reports import LOG, Observer, ProducerReport, peak_memory
from rdtexec.serving import Serve, ServeState, sharers
from rdtexec.transport import PRODUCERS, allowed
from rdtexec.transport.base import ProducerTransport
from rdtexec.transport.local import node
from rdtplan.errors import InputError, RdtError, TransferError

PROTOCOL = 2
RECONNECT_S = 15.0
"""How long a sync waits for a consumer that was connected and is not; the stall timeout, where that is shorter."""

ANSWER_S = 1.0
"""How long a rank that gives up listens for whom its consumers wait."""


class GroupSource(Protocol):
    """A trainer's weights, one gather group at a time."""

    def start(self) -> None:
        """A sync begins: from now on `gather` gives the weights as they are now."""

    def gather(self, names: Sequence[str]) -> Iterable[tuple[str, torch.Tensor]]:
        """The full tensors of `names`, in that order. They stay unchanged until the group is freed.

        Where it is a collective of several ranks the source says so, with a method `partners` as that of
        `rdtexec.sources.Source`: after a failure the rest is then gathered too, lest one of them waits for another.
        """


class Producer:
    """The serving side of one trainer rank. Make it, hand its `address` to the consumers, call `sync` for each sync."""

    def __init__(
        self,
        plan: TrainerPlan,
        source: GroupSource,
        transport: str,
        *,
        authkey: bytes,
        address: Address | None = None,
        device: torch.device | None = None,
        stall_timeout_s: float = 300.0,
        plan_bytes: bytes | None = None,
        checksums: str = "off",
        on_identical: str = "warn",
        observer: Observer | None = None,
    ) -> None:
        """`transport` is a setting: `auto` lets each consumer use the best that it can.

        `device` is where chunks are packed, host memory unless given. `plan_bytes`, the plan file, is what consumers
        get that ask for it; without it they must have it already. InputError names every setting that is wrong.
        """
        _check_settings(checksums=checksums, on_identical=on_identical, stall_timeout_s=stall_timeout_s)
        self._plan_bytes = plan_bytes
        self.plan, self._source = plan, source
        self._allowed = allowed(transport)
        self._device = with_index(device or torch.device("cpu"))
        self._transports: dict[str, ProducerTransport] = {}
        """Made when the first consumer comes that uses it, or at once where there is no choice."""
        self._active: tuple[ProducerTransport, ...] = ()
        """Those of the running sync."""
        self._stall_timeout_s = stall_timeout_s
        self._checksums, self._on_identical = checksums, on_identical
        self._sample = payload.PayloadSample()
        self._wanted: dict[int, list[tuple[int, str, torch.dtype, torch.Size]]] = {}
        if self._device.type == "cuda" and on_identical != "ignore":
            for group in plan.producer.groups:
                sizes = [(shape.numel(), dtype.itemsize) for _, _, dtype, shape in self._expected(group)]
                self._sample.prepare(group, sizes, self._device)
        self._published: dict[int, torch.Tensor] = {}
        """Tensors of published groups by manifest index; kept for checksums alone."""
        self._observer = observer or Observer("producer", plan.producer.rank, plan.identity)
        self._state = ServeState(plan)
        self._changed = threading.Condition()
        self._serving = threading.Lock()
        """Held while the control thread serves or releases, and by a reset: no sync can begin under an old pack."""
        self._links: dict[int, Link] = {}
        self._uses: dict[int, str] = {}
        """Transport of each connected consumer."""
        self._strangers: list[Link] = []
        """Connections that serve nobody yet."""
        self._welcomed: dict[Link, tuple[int, str]] = {}
        """Strangers that were welcomed as a consumer, with a transport, and have not committed to it."""
        self._lost: dict[int, RdtError] = {}
        """Consumers that were connected and are not, and why."""
        self._waits: dict[int, str] = {}
        """By consumer: whom it waited for when this rank gave up."""
        self._failure: RdtError | None = None
        self._cancelled: tuple[int, RdtError] | None = None
        self._never_began = -1
        """The last sync that failed before it began: word of other failures of it may still come."""
        self._ungathered: tuple[int, ...] = ()
        """Groups that the source, once started, has not been asked for; none when nobody knows where it stands."""
        self._progress = time.monotonic()
        self._serve_s = 0.0
        self._closing = False
        self._listener = listen(address)  # before anything is allocated: the address may be taken
        self.address: Address = self._listener.address
        try:
            if len(self._allowed) == 1:  # what cannot work is said here and not to the first consumer
                self._transport(self._allowed[0])
        except BaseException:
            self._listener.close()
            raise
        self._waker, self._wake = Pipe(duplex=False)
        accepting = (self._listener, authkey, self._meet, lambda: self._closing)
        self._threads = [
            threading.Thread(target=welcome_forever, args=accepting, name="rdtexec-accept", daemon=True),
            threading.Thread(target=self._control_loop, name="rdtexec-control", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # -- the caller's thread -------------------------------------------------------------------------------------------

    def sync(self, sync: int, live: Collection[int] | None = None) -> ProducerReport:
        """Send every group of one sync to the consumers `live`, all of the plan unless given.

        Every trainer rank must be given the same. TransferError when `sync` is no int of 0 or more, or when one of them
        dies, stalls, or the source is wrong; another sync can be run afterwards.
        """
        if type(sync) is not int or sync < 0:
            raise TransferError(f"the number of a sync must be an int of 0 or more, is {sync!r}", code="RDT609")
        taking_part = self.taking_part(live)
        started = time.perf_counter()
        gather_s = publish_s = wait_s = 0.0
        try:
            self._start_source()
            self._begin(sync, taking_part)
            while True:
                at = time.perf_counter()
                group = self._next_group()
                wait_s += time.perf_counter() - at
                if group is None:
                    break
                at = time.perf_counter()
                tensors = self._gather(group)
                gather_s += time.perf_counter() - at
                at = time.perf_counter()
                self._publish(group, tensors)
                del tensors  # or the next gather would run beside one group more than the plan counts
                publish_s += time.perf_counter() - at
            at = time.perf_counter()
            self._wait(lambda: self._state.finished, "the last groups to be freed and the models to be complete")
            wait_s += time.perf_counter() - at
            if self._sample.identical:  # before anybody reports success
                self._alarm(sync)
            self._tell_done(sync, taking_part)
        except BaseException as error:
            self._abort(error, sync, taking_part)
            if isinstance(error, Exception):
                self._gather_along()
            explained = self._explained(error, taking_part)
            self._observer.failed(sync, explained)
            if explained is error:
                raise
            raise explained from None
        finally:
            with self._changed:
                self._state.end()
        report = ProducerReport(
            sync=sync,
            groups=len(self.plan.producer.groups),
            pulls=self._state.served,
            bytes=self._state.served_bytes,
            seconds=time.perf_counter() - started,
            gather_s=gather_s,
            publish_s=publish_s,
            serve_s=self._serve_s,
            wait_s=wait_s,
            peak_memory=peak_memory(self._device),
            identical=self._sample.identical,
            sampled=self._sample.compared,
        )
        self._observer.succeeded(report)
        return report

    def forget_payload(self) -> None:
        """The last sync counts as failed, though not here: a retry that sends the same is no reason for the alarm."""
        self._sample.forget()

    def cancel(self, sync: int, reason: str) -> None:
        """Fail a sync from outside, from any thread, whether it has begun or not."""
        error = TransferError(f"sync {sync}: {reason}", code="RDT606")
        with self._changed:
            running = self._state.running and self._state.sync == sync
            if not running:
                self._cancelled = (sync, error)
            self._changed.notify_all()
        if running:
            self._abort(error, sync, self._state.live)

    def _explained(self, error: BaseException, live: Collection[int]) -> BaseException:
        """A stall, with what the consumers that live say they wait for: it may be another rank that holds them up."""
        if not isinstance(error, RdtError) or error.code != "RDT602":
            return error
        with self._changed:
            self._changed.wait_for(lambda: not any(cid in self._links for cid in live), ANSWER_S)
            said = [self._waits[cid] for cid in sorted(live) if self._waits.get(cid)]
        if not said:
            return error
        return TransferError(f"{error.message}; {'; '.join(said[:4])}", fix=error.fix, code=error.code)

    def taking_part(self, live: Collection[int] | None) -> tuple[int, ...]:
        """The consumers of a sync with these live ones; InputError RDT113 when the plan does not have them."""
        everyone = self.plan.consumer_ids if self.plan.producer.groups else ()  # nobody connects to who has nothing
        if live is None or not everyone:
            return everyone
        chosen = tuple(sorted(set(live)))
        if not chosen or not set(chosen) <= set(everyone):
            raise InputError(
                f"live_consumer_ids must be some of 0 to {len(everyone) - 1}, are {list(live)}",
                fix="name the consumers that are to take part, or None for all",
                code="RDT113",
            )
        return chosen

    def _begin(self, sync: int, live: tuple[int, ...]) -> None:
        """Wait for the consumers of this sync, forget what a failed one left, and open the gate."""
        with self._changed:
            try:
                self._await_consumers(sync, live)
            except TransferError:
                self._never_began = sync
                raise
            if self._failure is not None:
                self._let_go()
            with self._serving:
                self._failure = None
                used = {self._uses[c] for c in live if c in self._uses}
                self._active = tuple(t for name, t in self._transports.items() if name in used)
            self._serve_s = 0.0
            self._waits.clear()
            self._sample.start()
            sharing = [c for c in live if c in self._uses and self._transports[self._uses[c]].share_slots]
            self._state.begin(sync, live, sharing)
            self._note_progress()
        self._kick()

    def _let_go(self) -> None:
        """Forget what a failed sync has gathered. Holds the lock."""
        with self._serving:
            for transport in self._transports.values():
                transport.reset()
            self._published.clear()
            self._sample.forget()

    def _await_consumers(self, sync: int, live: tuple[int, ...]) -> None:
        """Every consumer of the sync is connected, or TransferError says which is not and why. Holds the lock."""
        began = time.monotonic()
        while absent := [c for c in live if c not in self._links]:
            self._raise_cancelled(sync)
            gone = [c for c in absent if c in self._lost]
            patience = min(RECONNECT_S, self._stall_timeout_s) if gone else self._stall_timeout_s
            left = began + patience - time.monotonic()
            if left <= 0:
                cid = (gone or absent)[0]
                why = self._lost[cid].message if gone else f"consumer {cid} has not connected"
                raise TransferError(
                    f"sync {sync} cannot start on producer {self.plan.producer.rank}: {why} "
                    f"(waited {patience:.1f} s for consumers {absent[:8]})",
                    fix="restart and reconnect them, or sync with the others (live_consumer_ids)",
                    code=self._lost[cid].code if gone else "RDT602",
                )
            self._changed.wait(left)
        self._raise_cancelled(sync)

    def _raise_cancelled(self, sync: int) -> None:
        if self._cancelled is not None and self._cancelled[0] == sync:
            error, self._cancelled = self._cancelled[1], None
            raise error

    def _tell_done(self, sync: int, live: tuple[int, ...]) -> None:
        """Everybody is complete: only now may anybody report success."""
        with self._changed:
            links = [self._links[cid] for cid in live if cid in self._links]
        for link in links:
            _send_unless_gone(link, "done", sync=sync)

    def _publish(self, group: int, tensors: dict[int, torch.Tensor]) -> None:
        if self._on_identical != "ignore":
            self._sample.add(group, tensors)
        for transport in self._active:
            transport.publish(group, tensors)
        if self._checksums != "off":
            self._published.update(tensors)
        with self._changed:
            self._state.publish(group)
            self._note_progress()
        self._kick()

    def _alarm(self, sync: int) -> None:
        what = (
            f"sync {sync} of producer {self.plan.producer.rank} sent what the sync before sent: none of "
            f"{self._sample.compared:,} sampled elements changed"
        )
        fix = "look whether the optimizer stepped, and whether the source reads the trained weights"
        if self._on_identical == "fail":
            raise TransferError(what, fix=fix, code="RDT624")
        LOG.warning("%s; %s", what, fix)

    def _next_group(self) -> int | None:
        self._wait(lambda: self._state.all_gathered or self._state.next_group() is not None, "a gather credit")
        with self._changed:
            return self._state.next_group()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            while not condition():
                self._raise_failure()
                left = self._progress + self._stall_timeout_s - time.monotonic()
                if left <= 0:
                    raise TransferError(
                        f"producer {self.plan.producer.rank}, sync {self._state.sync}: no progress for "
                        f"{self._stall_timeout_s:.1f} s while waiting for {what}: {self._state.waiting_for()}",
                        fix="look at the consumers named; raise stall_timeout_s if they are only slow",
                        code="RDT602",
                    )
                self._changed.wait(left)
            self._raise_failure()

    def _start_source(self) -> None:
        self._ungathered = ()
        self._source.start()
        self._ungathered = self.plan.producer.groups

    def _gather_along(self) -> None:
        """After a failure: gather the rest along with the ranks that gather it together, and keep nothing.

        A rank that left a collective out would hang those that are in it, and pair its next one with theirs. Not after
        an error of the source itself: nobody knows which collectives it has taken part in.
        """
        try:
            rest = [group for group in self._ungathered if self._is_gathered_together(group)]
            if rest:
                with self._changed:  # as in a sync, no more groups than planned are to be in memory
                    self._state.end()
                    self._let_go()
            for group in rest:
                for _ in self._source.gather([name for _, name, _, _ in self._expected(group)]):
                    pass
        except Exception as error:  # the first error is the one to be told
            LOG.warning("producer %s could not gather the rest of a failed sync: %s", self.plan.producer.rank, error)

    def _is_gathered_together(self, group: int) -> bool:
        """Is it a collective of this rank and others?"""
        partners = getattr(self._source, "partners", None)
        if partners is None:
            return False
        return any(set(partners(name)) - {self.plan.producer.rank} for _, name, _, _ in self._expected(group))

    def _gather(self, group: int) -> dict[int, torch.Tensor]:
        """Gather one group's own names and hold them to the plan."""
        rest, self._ungathered = self._ungathered[1:], ()
        found = self._gathered(group)
        self._ungathered = rest
        return found

    def _gathered(self, group: int) -> dict[int, torch.Tensor]:
        wanted = self._expected(group)
        found: dict[int, torch.Tensor] = {}
        where = f"producer {self.plan.producer.rank}, group {self.plan.groups[group].label}"
        yielded = iter(self._source.gather([name for _, name, _, _ in wanted]))
        for k, expected, dtype, shape in wanted:
            item = next(yielded, None)
            if item is None:
                raise _bad_source(f"{where}: the source ended before {expected!r}")
            name, tensor = item
            if name != expected:
                raise _bad_source(f"{where}: the source yields {name!r} where the plan has {expected!r}")
            if tensor is None:
                raise _bad_source(f"{where}: the source claims {name!r} and yields nothing for it")
            if tensor.dtype is not dtype or tensor.shape != shape:
                raise _bad_source(
                    f"{where}: the source yields {name!r} as {str(tensor.dtype).removeprefix('torch.')} "
                    f"{tuple(tensor.shape)}, the plan has {str(dtype).removeprefix('torch.')} {tuple(shape)}"
                )
            found[k] = tensor.contiguous()
        extra = next(yielded, None)
        if extra is not None:
            raise _bad_source(f"{where}: the source yields {extra[0]!r}, which was not asked for")
        return found

    def _expected(self, group: int) -> list[tuple[int, str, torch.dtype, torch.Size]]:
        """(manifest index, name, dtype, shape) of this rank's own names of a group, in plan order; made once."""
        found = self._wanted.get(group)
        if found is None:
            manifest = self.plan.manifest
            found = self._wanted[group] = [
                (k, manifest.names[k], getattr(torch, manifest.dtype(k)), torch.Size(manifest.shape(k)))
                for k in self.plan.own_names(group)
            ]
        return found

    def close(self) -> None:
        """Stop serving and give memory back."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._kick()
        stop_welcoming(self._listener)
        for thread in self._threads:
            thread.join(5)
        self._listener.close()
        for link in [*self._links.values(), *self._strangers]:
            link.close()
        for transport in self._transports.values():
            transport.close()

    # -- shared --------------------------------------------------------------------------------------------------------

    def _note_progress(self) -> None:
        self._progress = time.monotonic()
        self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _kick(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send_bytes(b"1")

    def _abort(self, error: BaseException, sync: int, live: Collection[int]) -> None:
        """Tell every consumer of the sync why, so that none of them waits for its own deadline."""
        reason = _words(error)
        error_code = error.code if isinstance(error, RdtError) else ""
        with self._changed:
            if self._state.running and self._state.sync != sync:
                return  # the sync that this is about has ended, and another has begun
            if self._failure is None:
                self._failure = error if isinstance(error, RdtError) else TransferError(reason, code="RDT606")
            links = [link for cid, link in self._links.items() if cid in live]
            self._changed.notify_all()
        me = f"producer {self.plan.producer.rank}"
        for link in links:
            with contextlib.suppress(RdtError):
                said = reason if reason.startswith(me) else f"{me}: {reason}"
                link.send("failed", sync=sync, reason=said, code=error_code)

    # -- the control thread --------------------------------------------------------------------------------------------

    def _meet(self, connection: Connection) -> None:
        link = Link(connection, "a consumer that has not said who it is")
        with self._changed:
            if self._closing:
                link.close()
                return
            self._strangers.append(link)
        self._kick()

    def _control_loop(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread starts on the first GPU
        while not self._closing:
            with self._changed:
                links: dict[Connection, tuple[int | None, Link]] = {}
                links |= {link.connection: (cid, link) for cid, link in self._links.items()}
                links |= {link.connection: (None, link) for link in self._strangers}
            ready: list[Connection] = wait([self._waker, *links])  # type: ignore[assignment]
            for connection in ready:
                if connection is self._waker:
                    self._waker.recv_bytes()
                    continue
                cid, link = links[connection]
                try:
                    message = link.receive(0)
                    if message is not None:
                        self._handle(cid, link, message)
                except RdtError as error:
                    self._drop(cid, link, error)
                except Exception as error:  # nothing that a peer or a transport does may end this thread
                    LOG.exception("handling a message of %s", link.peer)
                    self._drop(cid, link, TransferError(f"{link.peer}: {type(error).__name__}: {error}"))
            try:
                self._serve()
            except BaseException as error:
                self._abort(error, self._state.sync, self._state.live)

    def _handle(self, cid: int | None, link: Link, message: Message) -> None:
        kind = message["kind"]
        if cid is None:
            self._greet(link, message)
        elif kind == "pull":
            with self._changed:
                self._state.pull(cid, _int(link, message, "sync"), _int(link, message, "chunk"))
                self._note_progress()
        elif kind == "free":
            with self._changed:
                self._state.free(cid, _int(link, message, "sync"), _int(link, message, "group"))
                self._note_progress()
        elif kind == "complete":
            with self._changed:
                self._state.complete(cid, _int(link, message, "sync"))
                self._note_progress()
        elif kind == "failed":
            failed = _int(link, message, "sync")
            if failed > max(self._state.sync, self._never_began):  # it has failed already, here it has not begun
                self.cancel(failed, str(message.get("reason")))
            with self._changed:
                self._waits[cid] = str(message.get("waits") or "")
            raise TransferError(str(message.get("reason")), code="RDT606")
        else:
            raise TransferError(f"consumer {cid} sent a message of unknown kind {kind!r}", code="RDT603")

    def _greet(self, link: Link, message: Message) -> None:
        """Welcome a consumer that runs the same plan; tell any other what differs.

        It takes the place of an earlier connection only when it commits, after every producer welcomed it: a consumer
        that fails to connect leaves the one that works untouched.
        """
        if message["kind"] == "commit" and link in self._welcomed:
            self._admit(link, *self._welcomed[link])
            return
        if message["kind"] == "plan":
            if self._plan_bytes is None:
                link.send("refused", reason="this producer does not hand out its plan")
            else:
                send_bytes(link, "plan", self._plan_bytes)
            return
        cid = message.get("consumer")
        expected = {
            "protocol": PROTOCOL,
            "plan": self.plan.identity,
            "pair": self._pair_digest(cid) if isinstance(cid, int) else None,
        }
        for field, value in expected.items():
            if message.get(field) != value:
                ours = f"producer {self.plan.producer.rank} has {value!r}"
                raise self._refusal(link, cid, f"{field}: consumer {cid} has {message.get(field)!r}, {ours}")
        if not isinstance(cid, int) or cid not in self.plan.consumer_ids:
            raise self._refusal(link, cid, f"consumer id {cid!r} is not in the plan")
        name = self._choose(message)
        if name is None:
            theirs = f"consumer {cid} can use {message.get('transports')} (on this node: {self._is_near(message)})"
            raise self._refusal(link, cid, f"transport: {theirs}, this producer {list(self._allowed)}")
        try:
            facts = self._transport(name).welcome(cid) if cid in self.plan.consumers else {}
        except Exception as error:
            raise self._refusal(link, cid, _words(error), fix=getattr(error, "fix", "")) from error
        link.peer = f"consumer {cid}"
        with self._changed:
            self._welcomed[link] = (cid, name)
        link.send("welcome", rank=self.plan.producer.rank, transport=name, facts=facts)

    def _refusal(self, link: Link, cid: object, reason: str, *, fix: str = "") -> TransferError:
        """Tell a consumer why it is not welcome; the error to raise here."""
        link.send("refused", reason=reason, fix=fix)
        return TransferError(f"consumer {cid!r} was refused: {reason}", code="RDT603")

    def _choose(self, message: Message) -> str | None:
        """The first transport of the consumer's list that this producer permits and the pair can use.

        `local` is for pairs of one node whose memory is of one kind; where nothing else is permitted the consumer says
        what is wrong with it.
        """
        offered = message.get("transports")
        alike = message.get("device") == self._device.type
        for name in offered if isinstance(offered, list) else ():
            if name not in self._allowed:
                continue
            if name != "local" or self._allowed == ("local",) or (alike and self._is_near(message)):
                return str(name)
        return None

    def _is_near(self, message: Message) -> bool:
        return bool(message.get("node") == node())

    def _transport(self, name: str) -> ProducerTransport:
        """Made on first use; it takes part from the next sync on."""
        found = self._transports.get(name)
        if found is None:
            found = PRODUCERS[name](self._device)
            found.attach(self.plan, sharers(self.plan))
            with self._changed:
                self._transports[name] = found
        return found

    def _admit(self, link: Link, cid: int, transport: str) -> None:
        with self._changed:
            self._strangers.remove(link)
            del self._welcomed[link]
            old = self._links.pop(cid, None)
            self._lost.pop(cid, None)
            self._links[cid] = link
            if cid in self.plan.consumers:
                self._uses[cid] = transport
            self._state.forget(cid)
            self._note_progress()
            hit = self._hit(cid) if old is not None else None
            link.send("committed")  # before anybody can send it word of a sync that this may fail
        if old is not None:
            old.close()
        self._fail(hit, TransferError(f"consumer {cid} connected anew during the sync", code="RDT601"))

    def _pair_digest(self, cid: int) -> str | None:
        consumer = self.plan.consumers.get(cid)
        pairs = dict(consumer.routing.pair_digests) if consumer else {}
        return pairs.get(self.plan.producer.rank)

    def _drop(self, cid: int | None, link: Link, error: RdtError) -> None:
        hit = None
        with self._changed:
            if link in self._strangers:
                self._strangers.remove(link)
                self._welcomed.pop(link, None)
            if cid is not None and self._links.get(cid) is link:  # and not of a consumer that has connected anew
                hit = self._hit(cid)
                del self._links[cid]
                self._lost[cid] = error
            self._changed.notify_all()
        link.close()
        self._fail(hit, error)

    def _hit(self, cid: int) -> tuple[int, Collection[int]] | None:
        """The running sync and its consumers, when the loss of `cid` fails it.

        Asked under the lock under which `cid` is lost: a sync that begins after that has another connection of it.
        """
        state = self._state
        return (state.sync, state.live) if state.running and cid in state.live else None

    def _fail(self, hit: tuple[int, Collection[int]] | None, error: RdtError) -> None:
        """Fail a sync: the gather may be long, so everybody is told from here."""
        if hit is not None:
            sync, live = hit
            what = f"sync {sync} failed on producer {self.plan.producer.rank}: {error.message}"
            self._abort(TransferError(what, fix=error.fix, code=error.code), sync, live)

    def _serve(self) -> None:
        with self._changed:
            serves = self._state.take_ready()
            sync, run = self._state.sync, self._state.run
        for serve in serves:
            at = time.perf_counter()
            with self._serving:
                if not self._state.running or self._state.run != run:
                    return
                facts = self._transports[self._uses[serve.consumers[0]]].serve(
                    serve.consumers[0], serve.chunk, serve.seq
                )
                proof = self._proof(serve, sync)
            self._serve_s += time.perf_counter() - at
            for cid in serve.consumers:
                link = self._links.get(cid)
                if link is not None:
                    _send_unless_gone(link, "ready", sync=sync, chunk=serve.chunk, facts=facts, **proof)
        with self._changed:  # one critical section: the gather thread must not see the credit before the memory
            released = self._state.take_released()
            with self._serving:
                for group in released:
                    for transport in self._active:
                        transport.release(group)
                    for k in self.plan.own_names(group) if self._published else ():
                        self._published.pop(k, None)
            if released:
                self._note_progress()

    def _proof(self, serve: Serve, sync: int) -> dict[str, str]:
        """The digest of a chunk's slices where the trainer holds them, when this chunk is to be checked."""
        if not checksum.wanted(self._checksums, sync, serve.chunk):
            return {}
        program = self.plan.consumers[serve.consumers[0]].program
        slices: dict[int, torch.Tensor] = {}
        for s in chunk_scatters(program, serve.chunk):
            key = program.scatters.key[s]
            if key not in slices:
                k = program.keys.source[key]
                full = typed(self._published[k], program.dtype_table[program.keys.dtype[key]])
                slices[key] = strided(full, program.regions[program.keys.region[key]])
        order = (slices[program.scatters.key[s]] for s in chunk_scatters(program, serve.chunk))
        return {"checksum": checksum.digest(order)}


def _send_unless_gone(link: Link, kind: str, **fields: object) -> None:
    """A peer that is gone is noticed where its messages are read: the last of them may say why."""
    try:
        link.send(kind, **fields)
    except RdtError as error:
        if error.code != "RDT601":
            raise


def _check_settings(*, checksums: str, on_identical: str, stall_timeout_s: float) -> None:
    wrong = []
    if checksums not in checksum.MODES:
        wrong.append(f"checksums must be one of {', '.join(checksum.MODES)}, is {checksums!r}")
    if on_identical not in payload.MODES:
        wrong.append(f"on_identical must be one of {', '.join(payload.MODES)}, is {on_identical!r}")
    if stall_timeout_s <= 0:
        wrong.append(f"stall_timeout_s must be positive, is {stall_timeout_s}")
    if wrong:
        raise InputError("; ".join(wrong), code="RDT111")


def _words(error: BaseException) -> str:
    return error.message if isinstance(error, RdtError) else f"{type(error).__name__}: {error}"


def _int(link: Link, message: Message, field: str) -> int:
    value = message.get(field)
    if type(value) is not int:
        raise TransferError(
            f"{link.peer} sent {message['kind']!r} with {field}: expected an int, found {value!r}", code="RDT603"
        )
    return value


def _bad_source(what: str) -> TransferError:
    return TransferError(what, fix="the trainer's weights must be those the plan was compiled for", code="RDT607")
