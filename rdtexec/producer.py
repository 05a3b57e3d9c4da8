"""The producer: gathers group by group in plan order, publishes, serves pulls, and frees when the last signal came.

Two threads share one lock. The caller's thread runs `sync`: it gathers (which may be a collective), publishes, and
waits for credit. The control thread owns the sockets: it accepts consumers, takes their pulls and free signals, packs
and answers. All decisions are in `ServeState`; this file only carries them out.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Protocol

import torch
from attrs import frozen

from rdtexec.control import Address, Link, Message, listen, send_plan
from rdtexec.plans import TrainerPlan
from rdtexec.serving import ServeState
from rdtexec.transport.base import ProducerTransport
from rdtplan.errors import RdtError, TransferError

PROTOCOL = 1


class GroupSource(Protocol):
    """A trainer's weights, one gather group at a time."""

    def start(self) -> None:
        """A sync begins: from now on `gather` gives the weights as they are now."""

    def gather(self, names: Sequence[str]) -> Iterable[tuple[str, torch.Tensor]]:
        """The full tensors of `names`, in that order. They stay unchanged until the group is freed."""


@frozen
class ProducerReport:
    """One sync as a producer saw it."""

    sync: int
    groups: int
    served: int
    """Chunks served."""
    seconds: float
    gather_s: float
    publish_s: float


class Producer:
    """The serving side of one trainer rank. Make it, hand its `address` to the consumers, call `sync` for each sync."""

    def __init__(
        self,
        plan: TrainerPlan,
        source: GroupSource,
        transport: ProducerTransport,
        *,
        authkey: bytes,
        address: Address | None = None,
        stall_timeout_s: float = 300.0,
        plan_bytes: bytes | None = None,
    ) -> None:
        """`plan_bytes`, the plan file, is what consumers get that ask for it; without it they must have it already."""
        self._plan_bytes = plan_bytes
        self.plan, self._source, self._transport = plan, source, transport
        self._stall_timeout_s = stall_timeout_s
        self._state = ServeState(plan, share_slots=transport.share_slots)
        transport.attach(plan, {c: self._state.sharers(c) for c in plan.consumers})
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        self._strangers: list[Link] = []
        """Connections that serve nobody yet."""
        self._welcomed: dict[Link, int] = {}
        """Strangers that were welcomed as a consumer and have not committed to it."""
        self._lost: dict[int, RdtError] = {}
        """Consumers that were connected and are not, and why."""
        self._failure: RdtError | None = None
        self._progress = time.monotonic()
        self._closing = False
        self._pid = os.getpid()
        self._waker, self._wake = Pipe(duplex=False)
        self._listener = listen(address, authkey=authkey)
        self.address: Address = self._listener.address
        self._threads = [
            threading.Thread(target=self._accept_loop, name="rdtexec-accept", daemon=True),
            threading.Thread(target=self._control_loop, name="rdtexec-control", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # -- the caller's thread -------------------------------------------------------------------------------------------

    def sync(self, sync: int) -> ProducerReport:
        """Send every group of one sync. TransferError when a consumer dies, stalls, or the source is wrong."""
        started = time.perf_counter()
        gather_s = publish_s = 0.0
        with self._changed:
            self._raise_failure()
            for cid, error in self._lost.items():
                raise TransferError(
                    f"sync {sync} cannot start on producer {self.plan.producer.rank}: {error.message}",
                    fix=f"restart and reconnect consumer {cid}",
                    code=error.code,
                )
            self._state.begin(sync, self.plan.consumer_ids)
            self._source.start()
            self._note_progress()
        self._kick()
        try:
            while True:
                group = self._next_group()
                if group is None:
                    break
                at = time.perf_counter()
                tensors = self._gather(group)
                gather_s += time.perf_counter() - at
                at = time.perf_counter()
                self._transport.publish(group, tensors)
                publish_s += time.perf_counter() - at
                with self._changed:
                    self._state.publish(group)
                    self._note_progress()
                self._kick()
            self._wait(lambda: self._state.finished, "the last groups to be freed")
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            with self._changed:
                self._state.end()
        return ProducerReport(
            sync,
            len(self.plan.producer.groups),
            self._state.served,
            time.perf_counter() - started,
            gather_s,
            publish_s,
        )

    def _next_group(self) -> int | None:
        self._wait(lambda: self._state.all_gathered or self._state.next_group() is not None, "a gather credit")
        with self._changed:
            return self._state.next_group()

    def _wait(self, condition: object, what: str) -> None:
        assert callable(condition)
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

    def _gather(self, group: int) -> dict[int, torch.Tensor]:
        """Gather one group's own names and hold them to the plan."""
        manifest = self.plan.manifest
        wanted = self.plan.own_names(group)
        names = [manifest.names[k] for k in wanted]
        found: dict[int, torch.Tensor] = {}
        where = f"producer {self.plan.producer.rank}, group {self.plan.groups[group].label}"
        yielded = iter(self._source.gather(names))
        for k, expected in zip(wanted, names, strict=True):
            item = next(yielded, None)
            if item is None:
                raise _bad_source(f"{where}: the source ended before {expected!r}")
            name, tensor = item
            if name != expected:
                raise _bad_source(f"{where}: the source yields {name!r} where the plan has {expected!r}")
            if tensor is None:
                raise _bad_source(f"{where}: the source claims {name!r} and yields nothing for it")
            dtype = str(tensor.dtype).removeprefix("torch.")
            if (dtype, tuple(tensor.shape)) != (manifest.dtype(k), manifest.shape(k)):
                raise _bad_source(
                    f"{where}: the source yields {name!r} as {dtype} {tuple(tensor.shape)}, "
                    f"the plan has {manifest.dtype(k)} {manifest.shape(k)}"
                )
            found[k] = tensor.contiguous()
        extra = next(yielded, None)
        if extra is not None:
            raise _bad_source(f"{where}: the source yields {extra[0]!r}, which was not asked for")
        return found

    def close(self) -> None:
        """Stop serving and give memory back."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._kick()
        self._unblock_accept()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()
        for link in [*self._links.values(), *self._strangers]:
            link.close()
        self._transport.close()

    def _unblock_accept(self) -> None:
        """`accept` cannot be interrupted; connecting to it ends the wait."""
        import socket

        with contextlib.suppress(OSError):
            family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(1)
                sock.connect(self.address)

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

    def _abort(self, error: BaseException) -> None:
        """Tell every consumer why, so that none of them waits for its own deadline."""
        reason = error.message if isinstance(error, RdtError) else f"{type(error).__name__}: {error}"
        with self._changed:
            if self._failure is None:
                self._failure = error if isinstance(error, RdtError) else TransferError(reason, code="RDT606")
            links = list(self._links.values())
        for link in links:
            with contextlib.suppress(RdtError):
                link.send("failed", reason=f"producer {self.plan.producer.rank}: {reason}")

    # -- the control thread --------------------------------------------------------------------------------------------

    def _accept_loop(self) -> None:
        while not self._closing:
            try:
                connection = self._listener.accept()
            except Exception:  # a stranger that failed authentication, or the end
                continue
            with self._changed:
                self._strangers.append(Link(connection, "a consumer that has not said who it is"))
            self._kick()

    def _control_loop(self) -> None:
        while not self._closing:
            with self._changed:
                links = {link.connection: (cid, link) for cid, link in self._links.items()}
                links |= {link.connection: (None, link) for link in self._strangers}
            ready: list[Connection] = wait([self._waker, *links])  # type: ignore[assignment,list-item]
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
            try:
                self._serve()
            except BaseException as error:
                self._abort(error)
                with self._changed:
                    self._changed.notify_all()

    def _handle(self, cid: int | None, link: Link, message: Message) -> None:
        kind = message["kind"]
        if cid is None:
            self._greet(link, message)
        elif kind == "pull":
            with self._changed:
                self._state.pull(cid, _int(message, "sync"), _int(message, "chunk"))
                self._note_progress()
        elif kind == "free":
            with self._changed:
                self._state.free(cid, _int(message, "sync"), _int(message, "group"))
                self._note_progress()
        elif kind == "failed":
            raise TransferError(str(message.get("reason")), code="RDT606")
        else:
            raise TransferError(f"consumer {cid} sent a message of unknown kind {kind!r}", code="RDT603")

    def _greet(self, link: Link, message: Message) -> None:
        """Welcome a consumer that runs the same plan; tell any other what differs.

        It takes the place of an earlier connection only when it commits, after every producer welcomed it: a consumer
        that fails to connect leaves the one that works untouched.
        """
        if message["kind"] == "commit" and link in self._welcomed:
            self._admit(link, self._welcomed[link])
            return
        if message["kind"] == "plan":
            if self._plan_bytes is None:
                link.send("refused", reason="this producer does not hand out its plan")
            else:
                send_plan(link, self._plan_bytes)
            return
        cid = message.get("consumer")
        expected = {
            "protocol": PROTOCOL,
            "transport": self._transport.name,
            "plan": self.plan.identity,
            "pair": self._pair_digest(cid) if isinstance(cid, int) else None,
        }
        for field, value in expected.items():
            if message.get(field) != value:
                ours = f"producer {self.plan.producer.rank} has {value!r}"
                link.send("refused", reason=f"{field}: consumer {cid} has {message.get(field)!r}, {ours}")
                raise TransferError(f"consumer {cid} was refused: its {field} differs", code="RDT603")
        if not isinstance(cid, int) or cid not in self.plan.consumer_ids:
            link.send("refused", reason=f"consumer id {cid!r} is not in the plan")
            raise TransferError(f"consumer {cid!r} is not in the plan", code="RDT603")
        facts = self._transport.welcome(cid, message.get("facts") or {})
        link.peer = f"consumer {cid}"
        with self._changed:
            self._welcomed[link] = cid
        link.send("welcome", rank=self.plan.producer.rank, facts=facts)

    def _admit(self, link: Link, cid: int) -> None:
        with self._changed:
            self._strangers.remove(link)
            del self._welcomed[link]
            old = self._links.pop(cid, None)
            self._lost.pop(cid, None)
            self._links[cid] = link
            self._note_progress()
        if old is not None:
            old.close()
        link.send("committed")

    def _pair_digest(self, cid: int) -> str | None:
        consumer = self.plan.consumers.get(cid)
        pairs = dict(consumer.routing.pair_digests) if consumer else {}
        return pairs.get(self.plan.producer.rank)

    def _drop(self, cid: int | None, link: Link, error: RdtError) -> None:
        with self._changed:
            if link in self._strangers:
                self._strangers.remove(link)
                self._welcomed.pop(link, None)
            if cid is not None and self._links.get(cid) is link:
                del self._links[cid]
                self._lost[cid] = error
                if self._state.running and self._failure is None:
                    self._failure = TransferError(
                        f"sync {self._state.sync} failed on producer {self.plan.producer.rank}: {error.message}",
                        fix=error.fix,
                        code=error.code,
                    )
            self._changed.notify_all()
        link.close()
        if self._failure is not None:
            self._abort(self._failure)

    def _serve(self) -> None:
        with self._changed:
            serves = self._state.take_ready()
            sync = self._state.sync
        for serve in serves:
            facts = self._transport.serve(serve.consumers[0], serve.chunk, serve.seq)
            for cid in serve.consumers:
                link = self._links.get(cid)
                if link is not None:
                    link.send("ready", sync=sync, chunk=serve.chunk, facts=facts)
        with self._changed:  # one critical section: the gather thread must not see the credit before the memory
            for group in self._state.take_released():
                self._transport.release(group)
                self._note_progress()


def _int(message: Message, field: str) -> int:
    value = message.get(field)
    if type(value) is not int:
        raise TransferError(f"message {message['kind']!r}: {field}: expected an int, found {value!r}", code="RDT603")
    return value


def _bad_source(what: str) -> TransferError:
    return TransferError(what, fix="the trainer's weights must be those the plan was compiled for", code="RDT607")
