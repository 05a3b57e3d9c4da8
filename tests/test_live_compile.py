"""Compiling at init from the workers' own traces: one plan for all, or one reason for all, whatever happens.

Traces are synthetic and the conversation is real; tests/vllm_sync.py has real workers.
"""

from __future__ import annotations

import ast
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen
from hypothesis import given, settings

from rdtexec.control import Address, dial, receive_bytes, send_bytes
from rdtexec.demo.fleet import Child, children, new_authkey
from rdtexec.live_compile import PROTOCOL, Exchange, Standing, Traced, compiled_live, trace_for_fleet
from rdtplan.compiler import DryRun, assemble
from rdtplan.errors import PlanError, RdtError, TraceError, TransferError
from rdtplan.ir.file import encode
from rdtplan.ir.manifest import Manifest
from rdtplan.ir.plan import Compiler, ModelIdentity
from rdtplan.ir.topology import InferenceTopology, positions
from rdtplan.ir.traces import RankTrace, distinct_traces
from tests.fleet import _context
from tests.plans import COMPILER, MODEL, Scenario, load, scenarios

KEY = new_authkey()
PRODUCERS = {"0": "/a/socket", "1": ["a-host", 4000]}
ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 20.0
SMALL = Scenario(topology=InferenceTopology(tensor_parallel=2, replicas=2))


@frozen
class Found:
    """What a worker tells of itself."""

    trace: RankTrace
    model: ModelIdentity = MODEL
    compiler: Compiler = COMPILER
    predicting: tuple[str, ...] = ()


Trace = Callable[[Manifest], Traced]


def standings(topology: InferenceTopology) -> list[Standing]:
    return [
        Standing(PROTOCOL, topology, replica, position)
        for replica in range(topology.replicas)
        for position in positions(topology)
    ]


def honest(scenario: Scenario, standing: Standing) -> Trace:
    """The trace of a worker that does what the scenario says."""
    return lambda manifest: Found(
        load(scenario.sizes, manifest, scenario.topology, standing.position).trace(standing.position)
    )


def work(address: Address, standing: Standing, trace: Trace, *, authkey: bytes = KEY) -> dict[str, Any]:
    return trace_for_fleet(
        address, standing, trace, authkey=authkey, connect_timeout_s=DEADLINE_S, stall_timeout_s=DEADLINE_S
    )


class Fleet:
    """Workers in threads, started by the call that rank 0 makes."""

    def __init__(self, scenario: Scenario, **other: tuple[Standing, Trace] | None) -> None:
        """`other`: by `workerN`, what one of them is instead; None for one that does not come."""
        self.workers = {c: (s, honest(scenario, s)) for c, s in enumerate(standings(scenario.topology))}
        for name, worker in other.items():
            number = int(name.removeprefix("worker"))
            self.workers.pop(number, None)
            if worker is not None:
                self.workers[number] = worker
        self.ended: dict[int, Future[dict[str, Any]]] = {}

    def call(self, address: Address) -> None:
        """As a `VLLMWeightSyncClient`: returns when all have ended, and does not say why one failed."""
        with ThreadPoolExecutor(len(self.workers)) as threads:
            self.ended = {c: threads.submit(work, address, *worker) for c, worker in self.workers.items()}
        if any(future.exception() for future in self.ended.values()):
            raise RuntimeError("500 Server Error")

    def errors(self) -> dict[int, RdtError | None]:
        return {c: future.exception() for c, future in self.ended.items()}  # type: ignore[misc]


@contextmanager
def compiling(scenario: Scenario, call: Callable[[Address], None], *, timeout_s: float = DEADLINE_S) -> Iterator[Any]:
    arguments = (scenario.entries, scenario.trainer_ranks, scenario.settings, (), call)
    with compiled_live(*arguments, authkey=KEY, timeout_s=timeout_s) as found:
        yield found


def compile_and_connect(scenario: Scenario, fleet: Fleet, *, timeout_s: float = DEADLINE_S) -> bytes:
    with compiling(scenario, fleet.call, timeout_s=timeout_s) as (plan, connect):
        connect(PRODUCERS)
        return encode(plan)[0]


def refused(fleet: Fleet, scenario: Scenario = SMALL, *, timeout_s: float = DEADLINE_S) -> RdtError:
    """The error on rank 0, when every worker has the same reason."""
    with pytest.raises(RdtError) as caught:
        compile_and_connect(scenario, fleet, timeout_s=timeout_s)
    for consumer, error in fleet.errors().items():
        assert isinstance(error, RdtError), (consumer, error)
        assert (type(error), error.code) == (type(caught.value), caught.value.code), error
        assert error.message in caught.value.message or caught.value.message in error.message, error
    return caught.value


def compiled(s: Scenario) -> bytes:
    """What the compiler makes of the traces of one replica."""
    traces = [load(s.sizes, s.manifest, s.topology, p).trace(p) for p in positions(s.topology)]
    distinct, trace_of = distinct_traces(traces)
    return encode(assemble(DryRun(s.manifest, s.owners, distinct, trace_of, s.fleet, MODEL, COMPILER)))[0]


def test_the_plan_is_the_compilers_and_everybody_has_the_addresses() -> None:
    fleet = Fleet(SMALL)
    assert compile_and_connect(SMALL, fleet) == compiled(SMALL)
    assert [future.result() for future in fleet.ended.values()] == [PRODUCERS] * 4


@settings(max_examples=12)
@given(scenarios())
def test_the_plan_of_any_fleet_is_the_compilers(scenario: Scenario) -> None:
    scenario = evolve(scenario, ownership="fsdp")
    assert compile_and_connect(scenario, Fleet(scenario)) == compiled(scenario)


def test_a_refused_trace_ends_it_for_all_with_its_reason() -> None:
    def trace(manifest: Manifest) -> Traced:
        raise TraceError("the loader needs data", fix="load it in another way", code="RDT201")

    fleet = Fleet(SMALL, worker3=(standings(SMALL.topology)[3], trace))
    error = refused(fleet)
    assert isinstance(error, TraceError) and error.code == "RDT201" and error.fix == "load it in another way"
    assert error.message == "consumer 3 (DP0 PP0 TP1 of replica 1): the loader needs data"


def test_any_other_error_of_a_worker_is_told_too() -> None:
    def trace(manifest: Manifest) -> Traced:
        raise MemoryError("no room for a second model")

    fleet = Fleet(SMALL, worker0=(standings(SMALL.topology)[0], trace))
    with pytest.raises(TransferError, match=r"consumer 0.*MemoryError: no room") as caught:
        compile_and_connect(SMALL, fleet)
    assert caught.value.code == "RDT606"
    assert isinstance(fleet.ended[0].exception(), MemoryError)
    assert "no room" in str(fleet.ended[1].exception())


def test_a_plan_that_is_not_complete_is_told_to_all() -> None:
    def less(standing: Standing) -> Trace:
        def trace(manifest: Manifest) -> Traced:
            found = honest(SMALL, standing)(manifest)
            columns = found.trace.fetches
            cut = {name: getattr(columns, name)[:-1] for name in type(columns).__slots__ if name[0] != "_"}
            return Found(evolve(found.trace, fetches=type(columns)(**cut)))

        return trace

    changed = {f"worker{c}": (s, less(s)) for c, s in enumerate(standings(SMALL.topology))}
    assert isinstance(refused(Fleet(SMALL, **changed)), PlanError)


def test_a_failure_after_the_plan_is_told_to_all() -> None:
    fleet = Fleet(SMALL)
    with pytest.raises(ValueError, match="no producer"), compiling(SMALL, fleet.call):
        raise ValueError("no producer")
    for error in fleet.errors().values():
        assert error is not None and error.code == "RDT606" and "no producer" in error.message


def test_a_worker_that_does_not_come_is_named() -> None:
    error = refused(Fleet(SMALL, worker2=None), timeout_s=1.0)
    assert error.code == "RDT627" and "consumers [2] of 4 did not come within 1.0 s" in error.message


def test_nobody_comes() -> None:
    with (
        pytest.raises(TransferError, match="no worker came within") as caught,
        compiling(SMALL, lambda _: threading.Event().wait(3) and None, timeout_s=0.5),
    ):
        pass
    assert caught.value.code == "RDT627"


def test_a_worker_that_traces_for_ever_is_named_and_hears_of_it() -> None:
    ended = threading.Event()

    def trace(manifest: Manifest) -> Traced:
        ended.wait(DEADLINE_S)
        return honest(SMALL, standings(SMALL.topology)[1])(manifest)

    fleet = Fleet(SMALL, worker1=(standings(SMALL.topology)[1], trace))
    release = threading.Timer(2.0, ended.set)  # after rank 0 has given up: its trace finds the reason
    release.start()
    error = refused(fleet, timeout_s=1.0)
    assert error.code == "RDT627" and "consumers [1] did not hand in their trace" in error.message


@pytest.mark.parametrize(
    ("changes", "found", "words"),
    [
        ({"topology": InferenceTopology(1, replicas=4)}, {}, "is of InferenceTopology"),
        ({"replica": 0}, {}, "is there twice"),
        ({"replica": 7}, {}, "stands outside of its own fleet"),
        ({"protocol": 0}, {}, "speaks version 0 of this protocol"),
        ({}, {"compiler": evolve(COMPILER, vllm="0.33.0")}, "vllm='0.33.0'"),
        ({}, {"model": evolve(MODEL, dtype="float16")}, "dtype='float16'"),
    ],
)
def test_a_worker_of_another_kind_is_named(changes: dict[str, Any], found: dict[str, Any], words: str) -> None:
    own = standings(SMALL.topology)[2]
    standing = evolve(own, **changes)
    if "topology" in changes:
        standing = evolve(standing, position=positions(changes["topology"])[0])
    trace: Trace = lambda manifest: evolve(honest(SMALL, own)(manifest), **found)  # type: ignore[type-var]  # noqa: E731
    error = refused(Fleet(SMALL, worker2=(standing, trace)))
    assert error.code == "RDT626" and words in error.message, error


def test_a_replica_that_loads_something_else_is_named() -> None:
    here = standings(SMALL.topology)
    fleet = Fleet(SMALL, worker3=(here[3], honest(SMALL, here[2])))
    error = refused(fleet)
    assert error.code == "RDT626"
    assert "consumer 3 (DP0 PP0 TP1 of replica 1) writes" in error.message
    assert "consumer 1 (DP0 PP0 TP1 of replica 0)" in error.message


def test_the_call_fails_before_anybody_came() -> None:
    def call(address: Address) -> None:
        raise OSError("no route to the server")

    with pytest.raises(TransferError, match="no route to the server") as caught, compiling(SMALL, call):
        pass
    assert caught.value.code == "RDT606"


def test_the_call_fails_before_the_reason_is_there() -> None:
    """A server answers 500, and the worker that knows why is heard a moment later: its reason counts."""
    standing = standings(SMALL.topology)[0]
    threads = []

    def call(address: Address) -> None:
        failed = threading.Event()

        def trace(manifest: Manifest) -> Traced:
            failed.set()
            threading.Event().wait(0.3)
            raise TraceError("the loader needs data", code="RDT201")

        def run() -> None:
            with pytest.raises(TraceError):
                work(address, standing, trace)

        threads.append(threading.Thread(target=run))
        threads[0].start()
        assert failed.wait(DEADLINE_S)
        raise RuntimeError("500 Server Error")

    with pytest.raises(TraceError, match=r"consumer 0 .*the loader needs data"), compiling(SMALL, call):
        pass
    threads[0].join(DEADLINE_S)


def test_a_worker_that_has_said_nothing_hears_the_reason_too() -> None:
    exchange = Exchange(SMALL.manifest, authkey=KEY)
    link = dial(exchange.address, "rank 0", authkey=KEY, timeout_s=5)
    try:
        exchange.refuse(PlanError("there is no plan", code="RDT310"))
        answer = link.receive(5)
        assert answer == {"kind": "refused", "code": "RDT310", "reason": "there is no plan", "fix": ""}
    finally:
        link.close()
        exchange.close()


def test_what_the_call_says_after_the_plan_is_raised_as_it_is() -> None:
    fleet = Fleet(SMALL)

    def call(address: Address) -> None:
        fleet.call(address)
        raise ConnectionError("the server refused its part of the plan")

    with pytest.raises(ConnectionError), compiling(SMALL, call) as (_, connect):
        connect(PRODUCERS)


def test_a_call_that_never_returns_after_the_plan_is_named() -> None:
    fleet = Fleet(SMALL)

    def call(address: Address) -> None:
        fleet.call(address)
        threading.Event().wait()

    words = "RDT602: init_weight_transfer_engine has not returned for"
    with pytest.raises(TransferError, match=words), compiling(SMALL, call, timeout_s=3.0) as (_, connect):
        connect(PRODUCERS)


def test_a_stranger_does_not_disturb() -> None:
    fleet = Fleet(SMALL)

    def call(address: Address) -> None:
        with pytest.raises(TransferError) as caught:
            work(address, standings(SMALL.topology)[0], honest(SMALL, standings(SMALL.topology)[0]), authkey=b"other")
        assert caught.value.code == "RDT604"
        fleet.call(address)

    with compiling(SMALL, call) as (_, connect):
        connect(PRODUCERS)


@pytest.mark.parametrize("what", ["standing", "facts", "trace", "digest", "order"])
def test_nonsense_is_refused_by_name(what: str) -> None:
    """A peer that has the key and is of another version: nothing of it gets into a plan."""
    good = Exchange(SMALL.manifest, authkey=KEY)
    standing = {"protocol": PROTOCOL, "replica": 0, "position": {"dp": 0, "pp": 0, "tp": 0}}
    standing["topology"] = {
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "data_parallel": 1,
        "expert_parallel": False,
        "replicas": 1,
    }
    facts: dict[str, Any] = {"written": "0" * 64, "compiler": {}, "model": {}, "predicting": []}
    facts["compiler"] = {"rdtplan": "1", "vllm": "1", "torch": "1", "target": "cpu"}
    facts["model"] = {"architecture": "A", "dtype": "bfloat16", "quantization": None, "config_digest": ""}
    try:
        link = dial(good.address, "rank 0", authkey=KEY, timeout_s=5)
        if what == "order":
            link.send("traced", facts=facts)
        else:
            link.send("worker", standing=standing | ({"replica": "0"} if what == "standing" else {}))
        if what in ("facts", "trace", "digest"):
            receive_bytes(link, "manifest", 5, lambda answer: AssertionError(answer))
            link.send("traced", facts=facts | ({"written": 1} if what == "facts" else {}))
        if what == "trace":
            send_bytes(link, "trace", b'{"position": 3}')
        if what == "digest":
            from rdtexec.live_compile import _bytes

            trace = honest(Scenario(), Standing(PROTOCOL, InferenceTopology(), 0, positions(InferenceTopology())[0]))
            send_bytes(link, "trace", _bytes(trace(Scenario().manifest).trace))
        with pytest.raises(TransferError) as caught:
            good.traces(5.0)
        assert caught.value.code == "RDT603", caught.value
    finally:
        good.close()
        link.close()


def doomed_main(pipe: Connection, address: Address, authkey: bytes, number: int) -> None:
    """A worker that is struck by a signal in the middle of its trace."""
    standing = standings(SMALL.topology)[1]

    def trace(manifest: Manifest) -> Traced:
        pipe.send("tracing")
        os.kill(os.getpid(), number)
        return honest(SMALL, standing)(manifest)

    work(address, standing, trace, authkey=authkey)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_struck_while_it_traces(number: signal.Signals) -> None:
    """A dead one is named at once, a stopped one at the deadline; the others hear of it."""
    fleet = Fleet(SMALL, worker1=None)

    def call(address: Address) -> None:
        mains = {"doomed": (doomed_main, (address, KEY, int(number)))}
        with children(_context(), mains, stop_timeout_s=0.1) as started:
            child: Child = started["doomed"]
            assert child.pipe.poll(60) and child.pipe.recv() == "tracing"
            fleet.call(address)

    deadline = 6.0 if number == signal.SIGSTOP else 3000.0
    error = refused_by(call, fleet, timeout_s=deadline)
    if number == signal.SIGKILL:
        assert error.code == "RDT601" and "consumer 1 (DP0 PP0 TP1 of replica 0) is gone" in error.message
    else:
        assert error.code == "RDT627" and "consumers [1] did not hand in their trace" in error.message


def refused_by(call: Callable[[Address], None], fleet: Fleet, *, timeout_s: float) -> RdtError:
    with pytest.raises(RdtError) as caught, compiling(SMALL, call, timeout_s=timeout_s):
        pass
    assert len(fleet.ended) == 3
    for error in fleet.errors().values():
        assert error is not None and error.code == caught.value.code, error
    return caught.value


def test_a_worker_that_dies_before_the_addresses_are_there() -> None:
    """While rank 0 compiles, or starts its producers: the caller is told, and does not report success."""
    fleet = Fleet(SMALL, worker1=None)
    gone = threading.Event()

    def call(address: Address) -> None:
        fleet.call(address)

    standing = standings(SMALL.topology)[1]

    def hang_up(address: Address) -> None:
        """Trace and hand in as a worker does, and then be gone."""
        from rdtexec.live_compile import _bytes, _digest, _Facts, _plain

        link = dial(address, "rank 0", authkey=KEY, timeout_s=5)
        link.send("worker", standing=_plain(standing))
        receive_bytes(link, "manifest", 5, lambda answer: AssertionError(answer))
        trace = honest(SMALL, standing)(SMALL.manifest).trace
        link.send("traced", facts=_plain(_Facts(MODEL, COMPILER, (), _digest(trace))))
        send_bytes(link, "trace", _bytes(trace))
        assert gone.wait(DEADLINE_S)
        link.close()

    def both(address: Address) -> None:
        thread = threading.Thread(target=hang_up, args=(address,), daemon=True)
        thread.start()
        call(address)

    with pytest.raises(TransferError) as caught, compiling(SMALL, both) as (_, connect):
        gone.set()
        threading.Event().wait(1.5)
        connect(PRODUCERS)
    assert caught.value.code == "RDT601" and "consumer 1" in caught.value.message
    assert [error.code for error in fleet.errors().values() if error is not None] == ["RDT601"] * 3


# -- who knows the compiler --------------------------------------------------------------------------------------------


def imported(module: str) -> set[str]:
    """Modules of this project that a module imports when it is imported itself."""
    path = ROOT / (module.replace(".", "/") + ".py")
    path = path if path.exists() else ROOT / module.replace(".", "/") / "__init__.py"
    if not path.exists():
        return set()
    found = {module.rpartition(".")[0]} - {""}
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for statement in body:
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            found.add(statement.module)
            found |= {f"{statement.module}.{alias.name}" for alias in statement.names}
    return {name for name in found if name.split(".")[0] in ("rdtplan", "rdtexec")}


def closure(start: set[str]) -> set[str]:
    seen: set[str] = set()
    while start - seen:
        module = (start - seen).pop()
        seen.add(module)
        start = start | imported(module)
    return seen


COMPILER_PARTS = ("rdtplan.compiler", *(f"rdtplan.trace.{part}" for part in ("recorder", "dry_run", "model", "live")))


def test_the_runtime_does_not_load_the_compiler_with_a_plan_file() -> None:
    """Of all that the two engines import when they are imported, nothing leads to the compiler or to the recorder."""
    loaded = closure({"rdtexec.vllm.engine", "rdtexec.vllm.trainer"})
    assert "rdtexec.producer" in loaded and "rdtplan.verify.structure" in loaded
    assert [m for m in sorted(loaded) if m.startswith((*COMPILER_PARTS, "rdtexec.live_compile"))] == []


def test_one_file_of_the_runtime_knows_the_compiler() -> None:
    knowing = set()
    for path in (ROOT / "rdtexec").rglob("*.py"):
        names = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        }
        if any(name.startswith((*COMPILER_PARTS, "rdtplan.passes")) for name in names):
            knowing.add(str(path.relative_to(ROOT)))
    demo = {name for name in knowing if name.startswith("rdtexec/demo/")}
    # the engine imports its own dry run, within the function that traces
    assert knowing - demo == {"rdtexec/live_compile.py", "rdtexec/vllm/engine.py"}


def test_mappings_of_addresses_stay_json() -> None:
    """Addresses travel as JSON: what a worker gets is what a client's payload would hold."""
    addresses: Mapping[str, Any] = {"0": ("host", 1)}
    fleet = Fleet(Scenario())
    with compiling(Scenario(), fleet.call) as (_, connect):
        connect(addresses)
    assert fleet.ended[0].result() == {"0": ["host", 1]}
