"""Faults between real processes: each sync ends in one error that names the culprit, and the promised next one works.

Each test goes the whole way: a good sync, the fault, how every process ends, the survivors alone, the rejoin, and a
sync after it, byte for byte. `--times` prints what each led to (docs/reliability.md).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rdtexec.consumer import Consumer
from rdtexec.control import Link, dial
from rdtexec.destination import Destination
from rdtexec.plans import WorkerPlan, load_trainer, load_worker
from rdtexec.producer import PROTOCOL, Producer
from rdtexec.transport.local import node
from rdtplan.errors import InputError, TransferError
from rdtplan.ir.file import write_plan
from rdtplan.ir.topology import InferenceTopology, TransferSettings
from tests.endings import Ending
from tests.fleet import Faults, Fleet, RandomSource, Strike, destination_model, running, usage
from tests.plans import Scenario, Sizes, make_plan

TRANSPORTS = ("local", "nixl")
SMALL = Sizes(layers=2, dense_layers=1)
FLEET = Scenario(SMALL, InferenceTopology(tensor_parallel=2), trainer_ranks=2)
"""Two trainer ranks that both own everything, two workers: nobody can finish a sync without all others."""
ALONE = Scenario(SMALL, InferenceTopology(tensor_parallel=2))
"""One trainer rank, two workers."""
STALL_S = 3.0
"""For faults that only a deadline ends. Long enough that a busy machine does not look like one."""

Note = Callable[[str, str, dict[str, Ending], str], None]


def failed(endings: dict[str, Ending], words: str) -> None:
    """Every process that lives reports an error, no success, and all name the culprit."""
    assert endings
    for name, ending in endings.items():
        assert ending.status == "error" and words in ending.value, (name, ending)


def recover(fleet: Fleet, sync: int) -> None:
    """Everybody connects anew, and the next sync is right to the last byte."""
    fleet.connect()
    fleet.sync(sync)
    assert fleet.wrong(sync) == {}


# -- somebody dies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_consumer_that_never_connects(transport: str, tmp_path: Path, note: Note) -> None:
    """It is named at the deadline; a sync without it works before it comes and one with it afterwards."""
    with running(FLEET, tmp_path, transport, stall_timeout_s=STALL_S, connect=False) as fleet:
        fleet.connect(0)
        fleet.sync(0, live=[0])
        assert fleet.wrong(0, [0]) == {}
        began = time.monotonic()
        for child in fleet.producers:
            child.tell("sync", (1, None, 1))
        fleet.workers[0].tell("sync", 1)
        endings = fleet.endings([*fleet.producers, fleet.workers[0]], began)
        failed(endings, "consumer 1 has not connected")
        note("a consumer never connects", transport, endings, "it connects; or a sync without it")
        recover(fleet, 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("point", ["between syncs", "read", "free"])
def test_a_killed_consumer(point: str, transport: str, tmp_path: Path, note: Note) -> None:
    """Named at once by its closed sockets; the other goes on without it; a new process in its place rejoins."""
    stall = STALL_S if point == "between syncs" else 60.0
    with running(FLEET, tmp_path, transport, stall_timeout_s=stall) as fleet:
        fleet.sync(0)
        fault = {"read": "mid-pull", "free": "between pull and free"}.get(point, point)
        if point == "between syncs":
            fleet.workers[1].process.kill()
            fleet.workers[1].process.join()
            began = time.monotonic()
            for child in fleet.producers:
                child.tell("sync", (1, None, 1))
            fleet.workers[0].tell("sync", 1)
            endings = fleet.endings([*fleet.producers, fleet.workers[0]], began)
        else:
            fleet.ask([fleet.workers[1]], "strike", Strike(point))
            fleet.begin(1)
            endings = fleet.endings(fleet.everyone)
            assert endings.pop("worker 1").status == "dead"
        failed(endings, "consumer 1 is gone")
        note(f"a consumer is killed, {fault}", transport, endings, "a sync without it; a new process rejoins")
        fleet.connect(0)
        fleet.sync(2, live=[0])
        assert fleet.wrong(2, [0]) == {}
        fleet.restart_worker(1)
        fleet.connect(1)
        fleet.sync(3)
        assert fleet.wrong(3) == {}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("point", ["between syncs", "serve", "free"])
def test_a_killed_producer(point: str, transport: str, tmp_path: Path, note: Note) -> None:
    """Named at once by workers and by the other rank; a new process in its place is connected to by an init anew."""
    with running(FLEET, tmp_path, transport, stall_timeout_s=60.0) as fleet:
        fleet.sync(0)
        fault = {"serve": "between pack and ready", "free": "after serving, before the free"}.get(point, point)
        if point == "between syncs":
            fleet.producers[0].process.kill()
            fleet.producers[0].process.join()
            began = time.monotonic()
            fleet.producers[1].tell("sync", (1, None, 1))
            for child in fleet.workers:
                child.tell("sync", 1)
            endings = fleet.endings([fleet.producers[1], *fleet.workers], began)
        else:
            fleet.ask([fleet.producers[0]], "strike", Strike(point))
            fleet.begin(1)
            endings = fleet.endings(fleet.everyone)
            assert endings.pop("producer 0").status == "dead"
        failed(endings, "producer 0 is gone")
        note(f"a producer is killed, {fault}", transport, endings, "a new process, and an init anew")
        fleet.restart_producer(0)
        recover(fleet, 2)


def test_a_producer_whose_death_the_network_sees_first(tmp_path: Path) -> None:
    """The READ fails while the connection is still open: the error says that the producer is gone all the same."""
    with running(ALONE, tmp_path, "nixl", stall_timeout_s=60.0) as fleet:
        fleet.sync(0)
        fleet.ask(fleet.producers, "hold connections")
        fleet.ask([fleet.workers[0]], "kill before read", fleet.producers[0].process.pid)
        fleet.begin(1)
        endings = fleet.endings(fleet.everyone)
        assert endings.pop("producer 0").status == "dead"
        failed(endings, "producer 0 is gone")
        assert "before that, the READ of chunk" in endings["worker 0"].value
        fleet.restart_producer(0)
        recover(fleet, 2)


def test_reads_that_end_after_a_failure_leave_the_pool(tmp_path: Path) -> None:
    """A sync fails with a read under way, which lands: nothing can write to the pool any more, and it is used again."""
    with running(ALONE, tmp_path, "nixl", stall_timeout_s=60.0, connect=False) as fleet:
        pools = fleet.connect()
        fleet.sync(0)
        fleet.ask([fleet.workers[0]], "break after read")
        fleet.begin(1)
        failed(fleet.endings(fleet.everyone), "this worker broke")
        assert fleet.connect() == pools
        fleet.sync(2)
        assert fleet.wrong(2) == {}


# -- somebody stops, and goes on too late ------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("point", ["read", "free"])
def test_a_stopped_consumer(point: str, transport: str, tmp_path: Path, note: Note) -> None:
    """Named at the deadline. What it does when it goes on, two syncs late, touches nobody; it reports no success."""
    with running(FLEET, tmp_path, transport, stall_timeout_s=STALL_S) as fleet:
        fleet.sync(0)
        fleet.ask([fleet.workers[1]], "strike", Strike(point, signal.SIGSTOP))
        fleet.begin(1)
        endings = fleet.endings([*fleet.producers, fleet.workers[0]])
        for ending in endings.values():
            assert ending.status == "error" and "RDT60" in ending.value and "[1]" in ending.value, ending
        fault = "mid-pull" if point == "read" else "between pull and free"
        note(f"a consumer is stopped, {fault}", transport, endings, "a sync without it; it rejoins when it runs")
        fleet.connect(0)
        fleet.sync(2, live=[0])
        assert fleet.wrong(2, [0]) == {}
        os.kill(fleet.workers[1].process.pid, signal.SIGCONT)
        late = fleet.endings([fleet.workers[1]])
        failed(late, "sync 1")
        assert fleet.wrong(2, [0]) == {}
        fleet.connect(1)
        fleet.sync(3)
        assert fleet.wrong(3) == {}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("point", ["serve", "free"])
def test_a_stopped_producer(point: str, transport: str, tmp_path: Path, note: Note) -> None:
    """Who waits for it names it at the deadline; nothing is written to a model after that, however late it goes on."""
    with running(FLEET, tmp_path, transport, stall_timeout_s=STALL_S) as fleet:
        fleet.sync(0)
        fleet.ask([fleet.producers[0]], "strike", Strike(point, signal.SIGSTOP))
        fleet.begin(1)
        endings = fleet.endings([fleet.producers[1], *fleet.workers])
        assert all(e.status == "error" for e in endings.values()), endings
        named = {n for n, e in endings.items() if re.search(r"of producer 0|producers \[0\]", e.value)}
        assert {"producer 1", "worker 0"} <= named, endings  # worker 1 may be held up by producer 1 alone
        fault = "between pack and ready" if point == "serve" else "after serving, before the free"
        note(f"a producer is stopped, {fault}", transport, endings, "it goes on, and all connect anew")
        before = fleet.ask(fleet.workers, "fingerprint")
        os.kill(fleet.producers[0].process.pid, signal.SIGCONT)
        failed(fleet.endings([fleet.producers[0]]), "sync 1")
        time.sleep(0.5)
        assert fleet.ask(fleet.workers, "fingerprint") == before
        recover(fleet, 2)


def test_connecting_to_a_stopped_producer_ends_at_its_deadline(tmp_path: Path) -> None:
    """A stopped process accepts connections and says nothing."""
    with running(Scenario(), tmp_path, "local", connect=False) as fleet:
        os.kill(fleet.producers[0].process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(TransferError, match=r"RDT604.*producer 0 at .* accepts connections and does not answer"):
            dial(fleet.addresses[0], "producer 0", authkey=fleet.authkey, timeout_s=1.0)
        assert time.monotonic() - began < 30
        os.kill(fleet.producers[0].process.pid, signal.SIGCONT)
        recover(fleet, 0)


# -- live sets, timing of the ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_may_begin_long_after_the_others(transport: str, tmp_path: Path) -> None:
    """Pulls, signals and completions that come before a rank has begun its sync are kept for it."""
    pipeline = Scenario(Sizes(layers=2), trainer_ranks=2, ownership="fsdp")
    for number, scenario in enumerate((FLEET, pipeline)):
        directory = tmp_path / str(number)
        directory.mkdir()
        with running(scenario, directory, transport) as fleet:
            for sync, first in enumerate((fleet.producers[0], fleet.producers[1])):
                first.tell("sync", (sync, None, sync))
                for child in fleet.workers:
                    child.tell("sync", sync)
                time.sleep(1.0)
                for child in fleet.producers:
                    if child is not first:
                        child.tell("sync", (sync, None, sync))
                endings = fleet.endings(fleet.everyone)
                assert all(e.status == "ok" for e in endings.values()), endings
                assert fleet.wrong(sync) == {}


def test_ranks_with_different_live_sets_end_at_the_deadline(tmp_path: Path, note: Note) -> None:
    """The rank that waits for more consumers than the others names who is missing, and nobody succeeds."""
    with running(FLEET, tmp_path, "local", stall_timeout_s=STALL_S) as fleet:
        began = time.monotonic()
        fleet.producers[0].tell("sync", (0, [0], 0))
        fleet.producers[1].tell("sync", (0, None, 0))
        fleet.workers[0].tell("sync", 0)
        endings = fleet.endings([*fleet.producers, fleet.workers[0]], began)
        endings.pop("producer 0")  # all that it was told to serve is complete, and it does not know the other rank
        failed(endings, "[1]")
        note("ranks were given different live consumers", "local", endings, "the same on every rank")
        recover(fleet, 1)


@pytest.mark.parametrize("number", [-1, True, "1", (0, None)])
def test_the_number_of_a_sync_must_be_one(number: object, tmp_path: Path) -> None:
    with running(ALONE, tmp_path, "local") as fleet:
        fleet.sync(0)
        for child in fleet.producers:
            child.tell("sync", (number, None, 1))
        for ending in fleet.endings(fleet.producers).values():
            assert ending.status == "error"
            assert "RDT609" in str(ending.value)
            assert repr(number) in str(ending.value)
        fleet.sync(1)
        assert fleet.wrong(1) == {}


@pytest.mark.parametrize("live", [[], [2], [0, 7], [-1]])
def test_live_consumers_must_be_of_the_plan(live: list[int], tmp_path: Path) -> None:
    """Refused before anything is sent; the connected consumers know of nothing."""
    with running(ALONE, tmp_path, "local") as fleet:
        fleet.producers[0].tell("sync", (0, live, 0))
        status, text = fleet.answer(fleet.producers[0], 60)
        assert status == "error" and "RDT113" in text and str(live) in text
        fleet.sync(1)
        assert fleet.wrong(1) == {}


# -- a consumer that breaks the protocol -------------------------------------------------------------------------------


class Hostile:
    """Consumer 1 of a plan with one trainer rank, by hand."""

    def __init__(self, fleet: Fleet, directory: Path) -> None:
        self.plan: WorkerPlan = load_worker(directory / "fleet.plan", 1)
        self.fleet = fleet
        self.chunks = range(len(self.plan.consumer.program.chunks))
        self.groups = range(len(self.plan.groups))
        self.link = self.connect()

    def connect(self, **changes: Any) -> Link:
        link = dial(self.fleet.addresses[0], "producer 0", authkey=self.fleet.authkey, timeout_s=30)
        hello = {
            "protocol": PROTOCOL,
            "consumer": 1,
            "transports": ["local"],
            "node": node(),
            "plan": self.plan.identity,
            "pair": dict(self.plan.consumer.routing.pair_digests).get(0),
        }
        link.send("hello", **(hello | changes))
        answer = link.receive(30)
        assert answer is not None
        if answer["kind"] != "welcome":
            raise TransferError(answer["reason"], code="RDT608")
        link.send("commit")
        answer = link.receive(30)
        assert answer is not None and answer["kind"] == "committed"
        return link

    def pull(self, sync: int) -> None:
        for chunk in self.chunks:
            self.link.send("pull", sync=sync, chunk=chunk)

    def free(self, sync: int, *, leave_out: int = -1) -> None:
        for group in self.groups:
            if group != leave_out:
                self.link.send("free", sync=sync, group=group)

    def complete(self, sync: int) -> None:
        self.link.send("complete", sync=sync)

    def raw(self, data: bytes) -> None:
        os.write(self.link.connection.fileno(), data)


@pytest.fixture(params=["local"])
def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hostile]:
    with running(ALONE, tmp_path, request.param, stall_timeout_s=STALL_S, connect=False) as fleet:
        fleet.connect(0)
        yield Hostile(fleet, tmp_path)


def endings_of(hostile: Hostile, sync: int, act: Callable[[], None]) -> dict[str, Ending]:
    """One sync of the honest ones, in which the hostile one acts."""
    fleet = hostile.fleet
    began = time.monotonic()
    fleet.producers[0].tell("sync", (sync, None, sync))
    fleet.workers[0].tell("sync", sync)
    act()
    return fleet.endings([fleet.producers[0], fleet.workers[0]], began)


def still_works(hostile: Hostile, sync: int) -> None:
    """The honest consumer alone, and then with an honest one in the hostile one's place."""
    fleet = hostile.fleet
    fleet.connect(0)
    fleet.sync(sync, live=[0])
    assert fleet.wrong(sync, [0]) == {}
    recover(fleet, sync + 1)


def test_repeated_and_early_and_old_signals_change_nothing(hostile: Hostile) -> None:
    """Signals count once, in their own sync; what comes early is kept, what comes late is dropped."""

    def act() -> None:
        hostile.pull(1)  # early: for the next sync
        hostile.free(1)
        hostile.free(1)
        hostile.pull(0)
        for _ in range(3):
            hostile.free(0)
        hostile.complete(0)

    endings = endings_of(hostile, 0, act)
    assert all(e.status == "ok" for e in endings.values()), endings
    assert hostile.fleet.wrong(0, [0]) == {}

    def act_again() -> None:
        hostile.pull(0)  # old
        hostile.free(0)
        hostile.complete(0)
        time.sleep(0.5)
        hostile.complete(1)

    endings = endings_of(hostile, 1, act_again)
    assert all(e.status == "ok" for e in endings.values()), endings
    assert hostile.fleet.wrong(1, [0]) == {}
    still_works(hostile, 2)


@pytest.mark.parametrize("case", ["a free signal is lost", "free signals of an older sync", "it never says complete"])
def test_missing_signals_are_named_at_the_deadline(case: str, hostile: Hostile, note: Note) -> None:
    """The producer says who has not freed which group; a signal of an older sync is none."""

    def act() -> None:
        hostile.pull(1)
        if case == "a free signal is lost":
            hostile.free(1, leave_out=hostile.groups[-1])
        elif case == "it never says complete":
            hostile.free(1)
            return
        else:
            hostile.free(0)
        hostile.complete(1)

    endings = endings_of(hostile, 1, act)
    failed(endings, "consumers [1] have not")
    note(case, "local", endings, "all connect anew")
    still_works(hostile, 2)


def test_late_word_of_a_sync_that_never_began_does_not_fail_its_retry(hostile: Hostile) -> None:
    """A number may be used again: what a consumer says about the attempt before is not about this one."""

    def fail(words: str) -> None:
        """Say that sync 0 has failed, and wait until the producer has heard it: it hangs up."""
        link = hostile.link
        link.send("failed", sync=0, reason=words)
        with pytest.raises(TransferError, match="RDT601"):
            while True:
                link.receive(60.0)
        hostile.link = hostile.connect()

    fail("the first word")
    endings = endings_of(hostile, 0, lambda: None)
    failed(endings, "the first word")
    fail("the second word")
    recover(hostile.fleet, 0)


FIELDS: dict[str, Callable[[Hostile], None]] = {
    "unknown kind 'gimme'": lambda h: h.link.send("gimme", sync=0),
    "sent something that is no message": lambda h: h.link.connection.send_bytes(b"\x00\xffnonsense"),
    "sent a message without a kind": lambda h: h.link.connection.send_bytes(b"[1, 2, 3]"),
    "chunk: expected an int, found 'x'": lambda h: h.link.send("pull", sync=0, chunk="x"),
    "chunk 9999, which the plan does not give it": lambda h: h.link.send("pull", sync=0, chunk=9999),
    "group 9999, of which producer 0 owns nothing": lambda h: h.link.send("free", sync=0, group=9999),
    "sync: expected an int, found None": lambda h: h.link.send("complete"),
    "for chunk 0 a second time": lambda h: [h.link.send("pull", sync=0, chunk=0) for _ in range(2)] and None,
    "is gone: its connection closed": lambda h: h.raw(struct.pack("!i", 1 << 30) + b"far too long"),
}


def test_a_broken_message_fails_the_sync_by_name_and_the_next_one_works(hostile: Hostile, note: Note) -> None:
    """Unknown kinds, nonsense, wrong types, half a message: each is named, and the control thread lives on."""
    number = 0
    for words, act in FIELDS.items():
        link, hostile.link = hostile.link, hostile.connect()
        link.close()
        hostile.fleet.connect(0)
        sync = number

        def misbehave(act: Callable[[Hostile], None] = act, sync: int = sync) -> None:
            hostile.link.send("pull", sync=sync + 1, chunk=0)  # a good one first
            time.sleep(0.3)
            original = hostile.link.send
            hostile.link.send = lambda kind, **f: original(kind, **f | ({"sync": sync} if "sync" in f else {}))  # type: ignore[method-assign]
            act(hostile)

        endings = endings_of(hostile, sync, misbehave)
        failed(endings, "consumer 1")
        failed(endings, words)
        if "unknown kind" in words or "no message" in words:
            note(f"a consumer sends {words.removeprefix('sent ')}", "local", endings, "it connects anew")
        number += 1
    still_works(hostile, number)


def test_half_a_message_does_not_hold_up_the_producer(tmp_path: Path, note: Note) -> None:
    """A peer that stops in the middle of a message is named, and others are served meanwhile and afterwards."""
    with running(ALONE, tmp_path, "local", stall_timeout_s=60.0, connect=False) as fleet:
        fleet.connect(0)
        hostile = Hostile(fleet, tmp_path)
        half = struct.pack("!i", 100) + b'{"kind":'
        endings = endings_of(hostile, 0, lambda: hostile.raw(half))
        failed(endings, "consumer 1 sent the beginning of a message and not the rest")
        note("a consumer stops in the middle of a message", "local", endings, "it connects anew")
        hostile.connect()
        still_works(hostile, 1)


def test_strangers_on_the_socket_keep_nobody_out(hostile: Hostile) -> None:
    """Connections that stay silent, send noise, say who they are and no more, or are of another protocol."""
    address = hostile.fleet.addresses[0]
    silent = []
    for noise in (b"", b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, struct.pack("!i", -1) + b"\xff" * 64):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(address)
        sock.sendall(noise)
        silent.append(sock)
    half = dial(address, "producer 0", authkey=hostile.fleet.authkey, timeout_s=30)
    half.send("hello", protocol=PROTOCOL)
    for changes, words in (
        ({"protocol": PROTOCOL + 1}, "protocol: consumer 1 has"),
        ({"consumer": 7}, "consumer id 7 is not in the plan|pair: consumer 7"),
        ({"consumer": "1"}, "consumer id '1'|pair: consumer 1 has"),
        ({"pair": "0" * 64}, "pair: consumer 1 has"),
        ({"transports": ["pigeon"]}, "transport: consumer 1 can use"),
        ({"transports": None}, "transport: consumer 1 can use None"),
    ):
        with pytest.raises(TransferError, match=words):
            hostile.connect(**changes)
    recover(hostile.fleet, 0)
    for sock in silent:
        sock.close()


def test_a_second_consumer_of_the_same_id_takes_over(hostile: Hostile, note: Note) -> None:
    """Between syncs it replaces the first; during a sync it fails the sync, which then names the reason."""
    first, hostile.link = hostile.link, hostile.connect()
    deadline = time.monotonic() + 60
    with pytest.raises(TransferError, match="RDT601"):
        while time.monotonic() < deadline:
            first.receive(1.0)

    def act() -> None:
        time.sleep(0.3)
        hostile.link = hostile.connect()

    endings = endings_of(hostile, 0, act)
    failed(endings, "consumer 1 connected anew during the sync")
    note("a second consumer of the same id connects during a sync", "local", endings, "all connect anew")
    still_works(hostile, 1)


def test_a_sync_is_not_failed_for_who_connected_anew_before_it(hostile: Hostile) -> None:
    """The sync begins after the new connection counts and before the old one is closed."""
    hostile.fleet.ask(hostile.fleet.producers, "linger", 1)
    replaced, hostile.link = hostile.link, hostile.connect()

    def act() -> None:
        hostile.pull(0)
        hostile.free(0)
        hostile.complete(0)

    endings = endings_of(hostile, 0, act)
    assert all(e.status == "ok" for e in endings.values()), endings
    assert hostile.fleet.wrong(0, [0]) == {}
    replaced.close()


def test_a_rank_with_another_plan_is_named(tmp_path: Path) -> None:
    """The rank that differs refuses, with both digests; the rank that agreed goes on serving whom it had."""
    other = tmp_path / "other.plan"
    write_plan(make_plan(Scenario(SMALL, FLEET.topology, TransferSettings(gather_lookahead=2), 2)), other)
    with running(FLEET, tmp_path, "local") as fleet:
        plan = load_trainer(other, 1)
        producer = Producer(plan, RandomSource(plan.manifest, None), "local", authkey=fleet.authkey)
        try:
            worker = load_worker(tmp_path / "fleet.plan", 0)
            model = destination_model(worker.consumer.program.parameters)
            words = (
                f"RDT608.*producer 1 refused consumer 0: plan: consumer 0 has '{worker.identity}'.*'{plan.identity}'"
            )
            with pytest.raises(TransferError, match=words):
                Consumer(
                    worker,
                    Destination(model, worker.consumer.program),
                    "local",
                    {0: fleet.addresses[0], 1: producer.address},
                    authkey=fleet.authkey,
                )
        finally:
            producer.close()
        fleet.sync(0)
        assert fleet.wrong(0) == {}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_address_that_is_taken_is_named(transport: str, tmp_path: Path) -> None:
    """The second producer on a port says so as an input error, and leaves nothing behind."""
    write_plan(make_plan(Scenario()), tmp_path / "p")
    plan = load_trainer(tmp_path / "p", 0)
    source = RandomSource(plan.manifest, None)
    first = Producer(plan, source, transport, authkey=b"k", address=("127.0.0.1", 0))
    before = usage()
    with pytest.raises(InputError, match=r"RDT115.*cannot listen at"):
        Producer(plan, source, transport, authkey=b"k", address=first.address)
    after = usage()
    for kind in ("descriptors", "threads", "tasks"):
        assert after[kind] == before[kind], kind
    assert not [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
    first.close()


def test_a_transport_that_does_not_start_leaves_nothing_listening(tmp_path: Path, monkeypatch: Any) -> None:
    """The socket, by its path or its port, is free again."""
    write_plan(make_plan(Scenario()), tmp_path / "p")
    plan = load_trainer(tmp_path / "p", 0)
    monkeypatch.setenv("UCX_TLS", "rc_mlx5")
    before = usage()["descriptors"]
    address = str(tmp_path / "socket")
    with pytest.raises(TransferError, match="RDT614"):
        Producer(plan, RandomSource(plan.manifest, None), "nixl", authkey=b"k", address=address)
    assert not os.path.exists(address)
    assert usage()["descriptors"] == before


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_receive_pool_larger_than_memory(tmp_path: Path, note: Note) -> None:
    """The worker's init names the exact bytes; the producers go on."""
    huge = Scenario(SMALL, InferenceTopology(), TransferSettings(buffer_presize_gb=float(1 << 20)))
    with running(huge, tmp_path, "nixl", connect=False) as fleet:
        began = time.monotonic()
        fleet.workers[0].tell("start", fleet.addresses)
        endings = fleet.endings(fleet.workers, began)
        failed(endings, f"{1 << 50:,}")
        note("a receive pool larger than memory", "nixl", endings, "a plan with smaller slots")


@pytest.mark.parametrize(("step", "code"), [("agent", "RDT614"), ("memory", "RDT615")])
def test_nixl_does_not_start_or_does_not_register(step: str, code: str, tmp_path: Path, note: Note) -> None:
    """The worker's init fails and says which; a sync without it works, and one with it when NIXL does."""
    with running(ALONE, tmp_path, "nixl", connect=False) as fleet:
        fleet.connect(0)
        fleet.ask([fleet.workers[1]], "break nixl", step)
        began = time.monotonic()
        fleet.workers[1].tell("start", fleet.addresses)
        endings = fleet.endings([fleet.workers[1]], began)
        failed(endings, code)
        fault = "NIXL finds no network device" if step == "agent" else "NIXL registers no memory"
        note(fault, "nixl", endings, "mend it and init again")
        fleet.sync(0, live=[0])
        assert fleet.wrong(0, [0]) == {}
        fleet.ask([fleet.workers[1]], "heal nixl")
        fleet.connect(1)
        fleet.sync(1)
        assert fleet.wrong(1) == {}


@pytest.mark.parametrize("transport", ["nixl"])
def test_a_reinit_reuses_the_pool_or_is_refused(transport: str, tmp_path: Path) -> None:
    """The same geometry gets the same memory; another is refused with both, and the old connection works on."""
    with running(ALONE, tmp_path, transport) as fleet:
        first = fleet.ask(fleet.workers, "start", fleet.addresses)
        fleet.sync(0)
        assert fleet.connect() == first
        fleet.sync(1)
        assert fleet.wrong(1) == {}
        plan = load_worker(tmp_path / "fleet.plan", 0)
        model = destination_model(plan.consumer.program.parameters)
        consumer = Consumer(
            plan, Destination(model, plan.consumer.program), transport, fleet.addresses, authkey=fleet.authkey
        )
        other = tmp_path / "other.plan"
        write_plan(make_plan(Scenario(SMALL, ALONE.topology, TransferSettings(num_rdt_buffers=3))), other)
        wanted = load_worker(other, 0)
        with pytest.raises(TransferError, match=r"RDT618.*1 lanes of 2 slots .* needs 1 lanes of 3 slots"):
            Consumer(
                wanted,
                Destination(model, wanted.consumer.program),
                transport,
                fleet.addresses,
                authkey=fleet.authkey,
                pool=consumer.pool,
            )
        fleet.producers[0].tell("sync", (2, [0], 2))
        assert consumer.sync(2).pulls == len(plan.consumer.program.chunks)
        assert fleet.endings(fleet.producers)["producer 0"].status == "ok"
        consumer.close()
        recover(fleet, 3)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["hook", "raise"])
def test_an_exception_in_a_worker_or_in_the_trainer(kind: str, transport: str, tmp_path: Path, note: Note) -> None:
    """Post-processing that raises, and a gather that raises: named everywhere; the next sync works when mended."""
    words = "post-processing of module" if kind == "hook" else "the trainer's gather broke"
    with running(FLEET, tmp_path, transport, faults=Faults(kind, rank=0, sync=0)) as fleet:
        fleet.begin(0)
        endings = fleet.endings(fleet.everyone)
        failed(endings, words)
        fault = "post-processing raises" if kind == "hook" else "the trainer raises in gather"
        note(fault, transport, endings, "mend it; all connect anew")
        fleet.ask(fleet.everyone, "mend")
        recover(fleet, 1)
