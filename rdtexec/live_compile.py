"""A plan compiled at init from the live fleet: every worker traces itself, rank 0 makes one plan of all traces.

Both ends of the conversation, over the control protocol: a worker says where it stands, is given the manifest, and
answers with its trace, as data. Rank 0 runs the compiler over the traces and, when every producer is there, gives the
workers their addresses; from then on the plan is one like any other, fetched and held to the live model. Of several
replicas the first sends its traces, the others a digest that must be equal.

Every worker gets the plan or the reason why there is none, and so does the caller: whoever fails first, be it a loader,
the compiler or a process, ends the init for all. This is the one file of `rdtexec` that knows the compiler, and it is
imported only where there is no plan file.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

import cattrs
import orjson
from attrs import define, frozen

from rdtexec.calls import Call
from rdtexec.control import (
    Address,
    Link,
    Message,
    dial,
    listen,
    receive_bytes,
    send_bytes,
    stop_welcoming,
    welcome_forever,
)
from rdtplan.compiler import DryRun, Fleet, assemble, check_fleet_input
from rdtplan.errors import InputError, PlanError, PlanFormatError, PlanMismatch, RdtError, TraceError, TransferError
from rdtplan.inputs.owners import resolve_owners, resolve_pieces
from rdtplan.ir.digests import sha256
from rdtplan.ir.manifest import Manifest, SourceTensor, build_manifest
from rdtplan.ir.plan import Compiler, FleetPlan, ModelIdentity, Waiver
from rdtplan.ir.serialize import canonical_bytes, make_converter, read
from rdtplan.ir.topology import InferenceTopology, Position, TransferSettings, consumer_id, positions
from rdtplan.ir.traces import RankTrace, distinct_traces, written

PROTOCOL = 1
PATIENCE = 2.5
"""A worker waits so many deadlines for the plan: all others may use up one, and rank 0 knows who is to blame."""
REASON_S = 5.0
"""When the inference side fails, the reason may still be on its way from the worker that knows it."""
GOODBYE_S = 5.0
"""How long rank 0, when it has told why there is no plan, waits for the workers to end their init."""
DRAIN_S = 300.0
"""How long it goes on reading from a worker that is still tracing then: a closed connection would hide the reason."""
POLL_S = 0.5
PIECE_S = 30.0
"""For each piece of a trace that is being sent."""
_ERRORS = {e.code: e for e in (InputError, TraceError, PlanError, PlanFormatError, PlanMismatch, TransferError)}
_T = TypeVar("_T")


class Traced(Protocol):
    """What a worker found out about itself (`rdtplan.trace.live.LiveTrace`)."""

    @property
    def trace(self) -> RankTrace: ...
    @property
    def model(self) -> ModelIdentity: ...
    @property
    def compiler(self) -> Compiler: ...
    @property
    def predicting(self) -> tuple[str, ...]: ...


@frozen(slots=True)
class Standing:
    """Where a worker says that it stands, and in what fleet."""

    protocol: int
    topology: InferenceTopology
    replica: int
    position: Position

    @property
    def consumer(self) -> int:
        return consumer_id(self.topology, self.replica, self.position)


@frozen(slots=True)
class _Facts:
    """What workers of one fleet have in common, and the digest of what this one writes."""

    model: ModelIdentity
    compiler: Compiler
    predicting: tuple[str, ...]
    """Patterns of source names that only a draft model would load."""
    written: str


# -- the worker --------------------------------------------------------------------------------------------------------


def trace_for_fleet(
    address: Address,
    standing: Standing,
    trace: Callable[[Manifest], Traced],
    *,
    authkey: bytes,
    connect_timeout_s: float,
    stall_timeout_s: float,
) -> dict[str, Any]:
    """A worker's part: trace, hand in, and wait until everybody can run the plan. Returns the producers' addresses.

    RdtError with the reason when there is no plan, be it this worker's or another's.
    """
    link = dial(address, "trainer rank 0", authkey=authkey, timeout_s=connect_timeout_s)
    try:
        link.send("worker", standing=_plain(standing))
        manifest = _structured(receive_bytes(link, "manifest", stall_timeout_s, _no_plan), Manifest, "the manifest")
        try:
            found = trace(manifest)
        except BaseException as error:
            with contextlib.suppress(RdtError):
                link.send("refused", **_spelled(error))
            raise
        facts = _Facts(found.model, found.compiler, found.predicting, _digest(found.trace))
        link.send("traced", facts=_plain(facts))
        if standing.replica == 0:
            send_bytes(link, "trace", _bytes(found.trace))
        answer = link.receive(PATIENCE * stall_timeout_s)
        if answer is None or answer["kind"] != "compiled":
            raise _no_plan(answer)
        return dict(answer["producers"])
    finally:
        link.close()


def _no_plan(answer: Message | None) -> RdtError:
    if answer is None or answer["kind"] != "refused":
        what = "nothing" if answer is None else f"a message of kind {answer['kind']!r}"
        return TransferError(
            f"this worker waits for the plan that trainer rank 0 compiles at init, and got {what}",
            fix="look whether that process is stopped, and at its log",
            code="RDT602" if answer is None else "RDT603",
        )
    return _understood(answer, "no plan could be compiled at init: ")


# -- trainer rank 0 ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def compiled_live(
    entries: Sequence[SourceTensor],
    trainer_ranks: int,
    settings: TransferSettings,
    waivers: tuple[Waiver, ...],
    call: Callable[[Address], None],
    *,
    authkey: bytes,
    where: Address | None = None,
    timeout_s: float,
) -> Iterator[tuple[FleetPlan, Callable[[Mapping[str, Any]], None]]]:
    """Rank 0's part: yields the plan, and the function that is to be called when every producer has an address.

    `call` starts the init of every worker, which is to come to the address that it is given; it returns when they have
    ended. An error, here or in the body, is told to all workers; InputError, TraceError, PlanError or TransferError
    say whose it is.
    """
    entries = list(entries)
    check_fleet_input(Fleet(trainer_ranks=trainer_ranks, settings=settings))
    manifest = build_manifest(entries)
    owners = resolve_owners(entries, None, trainer_ranks)
    pieces = resolve_pieces(entries, None, trainer_ranks)
    exchange = Exchange(manifest, authkey=authkey, where=where)
    calling: Call | None = None

    def connect(producers: Mapping[str, Any]) -> None:
        exchange.answer(producers)
        assert calling is not None
        calling.result(timeout_s)

    try:
        what = "init_weight_transfer_engine"
        calling = Call(what, lambda: call(exchange.address), failed=exchange.inference_failed)
        found = exchange.traces(timeout_s)
        fleet = Fleet(topology=found.topology, trainer_ranks=trainer_ranks, settings=settings, waivers=waivers)
        traces, trace_of = distinct_traces(found.traces)
        yield (
            assemble(
                DryRun(
                    *(manifest, owners, traces, trace_of, fleet, found.model, found.compiler),
                    pieces=pieces,
                    predicting=found.predicting,
                )
            ),
            connect,
        )
    except BaseException as error:
        exchange.refuse(error)
        if calling is not None:
            calling.ended(GOODBYE_S)
        raise
    finally:
        exchange.close()


@frozen
class FleetTraces:
    """The traces of one replica, in the order of worker indices."""

    topology: InferenceTopology
    traces: tuple[RankTrace, ...]
    model: ModelIdentity
    compiler: Compiler
    predicting: tuple[str, ...]


@define
class _Worker:
    link: Link
    standing: Standing
    facts: _Facts | None = None
    trace: RankTrace | None = None
    told: bool = False
    """Has it been sent the outcome?"""

    @property
    def done(self) -> bool:
        return self.facts is not None and (self.trace is not None or self.standing.replica > 0)


class Exchange:
    """Where the workers come with their traces. One thread a worker; one condition guards all that they share.

    There is one outcome, addresses or an error, set once; every thread sends it to its worker and then reads until the
    worker hangs up, so that a worker that is still sending finds the reason and not a closed connection.
    """

    def __init__(self, manifest: Manifest, *, authkey: bytes, where: Address | None = None) -> None:
        self._manifest = _bytes(manifest)
        self._changed = threading.Condition()
        self._workers: dict[int, _Worker] = {}
        """By consumer id."""
        self._failure: RdtError | None = None
        """The first; it counts."""
        self._outcome: Mapping[str, Any] | RdtError | None = None
        self._called: BaseException | None = None
        self._closing = False
        self._listener = listen(where)
        self.address: Address = self._listener.address
        threading.Thread(
            target=welcome_forever,
            args=(self._listener, authkey, self._meet, lambda: self._closing),
            name="rdtexec-exchange",
            daemon=True,
        ).start()

    def traces(self, timeout_s: float) -> FleetTraces:
        """Wait until every worker of every replica has traced itself; RdtError names who did not, and why."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self._failure or self._called or self._complete(), timeout_s)
            if self._called is not None and self._failure is None:
                self._changed.wait_for(lambda: self._failure, REASON_S)
            if self._failure is not None:
                raise self._failure
            if self._called is not None:
                raise TransferError(
                    f"init_weight_transfer_engine failed before every worker had traced itself: {self._called}",
                    fix="look at the log of the inference server",
                    code="RDT606",
                ) from self._called
            if not ended:
                raise TransferError(
                    f"no plan could be compiled at init: {self._missing()} within {timeout_s:.1f} s",
                    fix="look at the logs of those workers; give every engine its replica_rank and num_replicas",
                    code="RDT627",
                )
            workers = [self._workers[c] for c in sorted(self._workers)]
        return _agreed(workers)

    def answer(self, producers: Mapping[str, Any]) -> None:
        """Every producer is there: send all workers to them. TransferError when one of the workers is gone."""
        with self._changed:
            if self._failure is None:
                self._outcome = producers
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._failure or all(w.told for w in self._workers.values()))
            if self._failure is not None:
                raise self._failure

    def refuse(self, error: BaseException) -> None:
        """There will be no plan: tell all workers why, those too that come later."""
        with self._changed:
            if not isinstance(self._outcome, RdtError):
                self._outcome = _as_rdt_error(error)
                self._changed.notify_all()

    def inference_failed(self, error: BaseException) -> None:
        """The call that makes the workers come has failed."""
        with self._changed:
            self._called = error
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody else in."""
        self._closing = True
        stop_welcoming(self._listener)
        self._listener.close()

    # -- one thread a worker -------------------------------------------------------------------------------------------

    def _meet(self, connection: Connection) -> None:
        link = Link(connection, "a worker that has not said who it is")
        try:
            self._converse(link)
        except Exception as error:
            self._fail(_as_rdt_error(error))
            if self._await_outcome(GOODBYE_S) and isinstance(self._outcome, RdtError):
                self._send_outcome(link)
        finally:
            link.close()

    def _converse(self, link: Link) -> None:
        standing = _structured(self._receive(link, "worker").get("standing"), Standing, "a worker's standing")
        worker = self._register(link, standing)
        send_bytes(link, "manifest", self._manifest)
        facts = _structured(self._receive(link, "traced").get("facts"), _Facts, f"what {link.peer} says")
        if standing.replica == 0:
            data = receive_bytes(link, "trace", PIECE_S, lambda answer: _unexpected(link, answer, "trace"))
            worker.trace = _structured(data, RankTrace, f"the trace of {link.peer}")
            if _digest(worker.trace) != facts.written:
                raise TransferError(f"the trace of {link.peer} has not the digest that it named", code="RDT603")
        with self._changed:
            worker.facts = facts
            self._changed.notify_all()
        while not self._await_outcome(POLL_S):
            if link.receive(0) is not None:
                raise TransferError(f"{link.peer} spoke before it was answered", code="RDT603")
        self._send_outcome(link)
        with self._changed:
            worker.told = True
            self._changed.notify_all()

    def _register(self, link: Link, standing: Standing) -> _Worker:
        """Note who it is; TransferError RDT626 when it does not fit those that came before."""
        topology, here = standing.topology, standing.consumer
        link.peer = f"consumer {here} ({standing.position} of replica {standing.replica})"
        with self._changed:
            first = next(iter(self._workers.values()), None)
            wrong = ""
            if standing.protocol != PROTOCOL:
                wrong = f"speaks version {standing.protocol} of this protocol, the trainer {PROTOCOL}"
            elif standing.position not in positions(topology) or not 0 <= standing.replica < topology.replicas:
                wrong = f"stands outside of its own fleet, {topology}"
            elif first is not None and first.standing.topology != topology:
                wrong = f"is of {topology}, {first.link.peer} of {first.standing.topology}"
            elif here in self._workers:
                wrong = "is there twice"
            if wrong:
                raise _differs(f"{link.peer} {wrong}")
            worker = self._workers[here] = _Worker(link, standing)
            self._changed.notify_all()
        return worker

    def _receive(self, link: Link, kind: str) -> Message:
        """The next message of a worker, however long it traces (`traces` has the deadline); the outcome, if it is one
        already, as an error.
        """
        while (answer := link.receive(POLL_S)) is None:
            if isinstance(self._outcome, RdtError):
                raise self._outcome
        if answer["kind"] == "refused":
            raise _understood(answer, f"{link.peer}: ")
        if answer["kind"] != kind:
            raise _unexpected(link, answer, kind)
        return answer

    def _await_outcome(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._outcome is not None, timeout_s)

    def _fail(self, error: RdtError) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def _send_outcome(self, link: Link) -> None:
        """Tell a worker how it ended; when there is no plan, let it first finish what it is saying."""
        outcome = self._outcome
        if not isinstance(outcome, RdtError):
            link.send("compiled", producers=dict(outcome or {}))
            return
        with contextlib.suppress(RdtError):  # it hangs up
            link.send("refused", **_spelled(outcome))
            until = time.monotonic() + DRAIN_S
            while time.monotonic() < until:
                link.receive(POLL_S)

    # -- under the condition -------------------------------------------------------------------------------------------

    def _expected(self) -> int:
        """Workers of the fleet, as those say that are there."""
        return next((w.standing.topology.workers for w in self._workers.values()), 0)

    def _complete(self) -> bool:
        return 0 < self._expected() == len(self._workers) and all(w.done for w in self._workers.values())

    def _missing(self) -> str:
        if not self._workers:
            return "no worker came"
        absent = sorted(set(range(self._expected())) - self._workers.keys())
        silent = sorted(c for c, worker in self._workers.items() if not worker.done)
        parts = [f"consumers {absent[:8]} of {self._expected()} did not come"] if absent else []
        parts += [f"consumers {silent[:8]} did not hand in their trace"] if silent else []
        return " and ".join(parts)


def _agreed(workers: Sequence[_Worker]) -> FleetTraces:
    """The traces of the first replica; TransferError RDT626 names the first worker that is of another kind."""
    topology = workers[0].standing.topology
    first = workers[: topology.workers_per_replica]
    for number, worker in enumerate(workers):
        like, facts = first[number % len(first)], worker.facts
        assert facts is not None and like.facts is not None and first[0].facts is not None
        for name, ours, theirs, whose in (
            ("runs", facts.compiler, first[0].facts.compiler, first[0]),
            ("has the model", facts.model, first[0].facts.model, first[0]),
            ("writes", facts.written[:16], like.facts.written[:16], like),
        ):
            if ours != theirs:
                raise _differs(f"{worker.link.peer} {name} {ours}, {whose.link.peer} {theirs}")
    facts = first[0].facts
    assert facts is not None
    traces = tuple(worker.trace for worker in first if worker.trace is not None)
    return FleetTraces(topology, traces, facts.model, facts.compiler, facts.predicting)


# -- words and data ----------------------------------------------------------------------------------------------------


def _differs(what: str) -> TransferError:
    return TransferError(
        f"no plan could be compiled at init: {what}",
        fix="one plan is for engines that run the same software and model with the same parallel sizes",
        code="RDT626",
    )


def _unexpected(link: Link, answer: Message | None, kind: str) -> TransferError:
    found = "nothing" if answer is None else f"{answer['kind']!r}"
    return TransferError(f"{link.peer} was to send {kind!r}, and sent {found}", code="RDT603")


def _as_rdt_error(error: BaseException) -> RdtError:
    return error if isinstance(error, RdtError) else TransferError(f"{type(error).__name__}: {error}", code="RDT606")


def _spelled(error: BaseException) -> dict[str, str]:
    """An error as the fields of a message."""
    known = _as_rdt_error(error)
    return {"code": known.code, "reason": known.message, "fix": known.fix}


def _understood(message: Message, before: str) -> RdtError:
    """The error of such a message: of the class and with the code that it had on the other side."""
    code, reason, fix = (str(message.get(field, "")) for field in ("code", "reason", "fix"))
    return _ERRORS.get(f"{code[:4]}00", TransferError)(before + reason, fix=fix, code=code)


@functools.cache
def _converter() -> cattrs.Converter:
    return make_converter()


def _plain(value: Any) -> Any:
    """Attrs classes as JSON-ready values."""
    return _converter().unstructure(value)


def _bytes(value: Any) -> bytes:
    return canonical_bytes(_plain(value))


def _digest(trace: RankTrace) -> str:
    return sha256(_plain(written(trace)))


def _structured(value: Any, cls: type[_T], what: str) -> _T:
    """Back from bytes or a plain value; TransferError RDT603 when it is something else."""
    try:
        return read(orjson.loads(value) if isinstance(value, bytes) else value, cls, what)
    except (orjson.JSONDecodeError, RdtError) as error:
        words = error.message if isinstance(error, RdtError) else f"{what}: {error}"
        raise TransferError(words, fix="both ends must run the same version of rdtplan", code="RDT603") from None
