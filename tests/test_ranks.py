"""The ranks of a trainer, in real processes: whatever happens to one of them, all end, and with one reason."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from rdtexec.demo.fleet import Child, children, collect, new_authkey
from rdtexec.demo.processes import serve_commands
from rdtexec.ranks import Ranks
from rdtplan.errors import TransferError
from tests.fleet import ANSWER_S, _context, _kill_and_wait

WORLD = 3
STALL_S = 3.0
KEY = new_authkey()
NOTHING = ("", "", None)
"""Happens in this sync."""


def rank_main(pipe: Connection, rank: int, authkey: bytes) -> None:
    ranks = Ranks(rank, WORLD, authkey=authkey, stall_timeout_s=STALL_S)

    served: list[int] = []

    def sync(argument: tuple[str, str, Any]) -> Any:
        phase, what, terms = argument

        def act(now: str) -> Callable[..., Any]:
            def run(*number: int) -> Any:
                served.extend(number)
                if now == phase:
                    if what == "raise":
                        raise ValueError(f"{now} broke on rank {rank}")
                    if what.startswith("kill "):
                        _kill_and_wait(int(what.split()[1]))
                    else:
                        os.kill(os.getpid(), getattr(signal, what))
                return (rank, *number)

            return run

        return ranks.together(act("ready"), act("serve"), act("finish"), {"terms": terms})

    def insist(_: Any) -> Any:
        """Sync again and again until it works."""
        while True:
            with contextlib.suppress(TransferError):
                return sync(("", "", None))

    handlers = {"address": lambda _: ranks.address, "connect": ranks.connect, "sync": sync, "insist": insist}
    serve_commands(pipe, handlers | {"served": lambda _: served})
    ranks.close()


@pytest.fixture
def ranks() -> Iterator[list[Child]]:
    mains = {f"rank {r}": (rank_main, (r, KEY)) for r in range(WORLD)}
    with children(_context(), mains, stop_timeout_s=5.0) as started:
        found = list(started.values())
        found[0].tell("address")
        address = collect(found[:1], ANSWER_S)["rank 0"]
        for child in found:
            child.tell("connect", address)
        collect(found, ANSWER_S)
        yield found


def sync(ranks: list[Child], rank: int = -1, phase: str = "", what: str = "") -> dict[str, tuple[str, str]]:
    """One sync in which something happens to one rank; how it ended on each."""
    for r, child in enumerate(ranks):
        child.tell("sync", (phase, what, None) if r == rank else NOTHING)
    return endings([child for r, child in enumerate(ranks) if (r, what) != (rank, "SIGSTOP")])


def endings(ranks: list[Child]) -> dict[str, tuple[str, str]]:
    """How the sync under way ends on each of these."""
    found: dict[str, tuple[str, str]] = {}
    for child in ranks:
        assert child.pipe.poll(ANSWER_S), f"{child.name} hangs"
        try:
            found[child.name] = child.pipe.recv()
        except (EOFError, ConnectionResetError):
            found[child.name] = ("dead", "")
    return found


def works(ranks: list[Child], number: int) -> None:
    assert sync(ranks) == {f"rank {r}": ("ok", (r, number)) for r in range(WORLD)}


@pytest.mark.parametrize(("rank", "phase"), [(0, "ready"), (0, "serve"), (1, "serve"), (2, "serve"), (0, "finish")])
def test_an_exception_anywhere_fails_everybody(rank: int, phase: str, ranks: list[Child]) -> None:
    """One reason, which names the rank; the next sync works."""
    works(ranks, 0)
    for status, text in sync(ranks, rank, phase, "raise").values():
        assert status == "error" and f"{phase} broke on rank {rank}" in text, text
    works(ranks, 2)


@pytest.mark.parametrize(("rank", "phase"), [(0, "ready"), (0, "serve"), (1, "serve"), (2, "serve"), (0, "finish")])
def test_a_dead_rank_is_named_at_once(rank: int, phase: str, ranks: list[Child]) -> None:
    """No rank hangs and none succeeds; without that rank there is no next sync either, which is said at once too."""
    works(ranks, 0)
    found = sync(ranks, rank, phase, "SIGKILL")
    assert found.pop(f"rank {rank}")[0] == "dead"
    for status, text in found.values():
        assert status == "error" and f"trainer rank {rank} is gone" in text, text
    for r in found:
        ranks[int(r[-1])].tell("sync", NOTHING)
    for r in found:
        status, text = ranks[int(r[-1])].pipe.recv()
        assert status == "error" and f"trainer rank {rank} is gone" in text, text


def test_a_rank_that_dies_before_the_last_word_is_named_on_all(ranks: list[Child]) -> None:
    """It has done its part, and rank 0 is at the workers' answer: the rank behind it is told too."""
    works(ranks, 0)
    found = sync(ranks, 0, "finish", f"kill {ranks[1].process.pid}")
    assert found.pop("rank 1")[0] == "dead"
    for status, text in found.values():
        assert status == "error" and "trainer rank 1 is gone" in text, text


@pytest.mark.parametrize(("rank", "phase"), [(0, "ready"), (1, "serve"), (0, "finish")])
def test_a_stopped_rank_is_named_at_the_deadline(rank: int, phase: str, ranks: list[Child]) -> None:
    """When it goes on, too late, it learns that the others gave up, and the next sync works."""
    works(ranks, 0)
    for status, text in sync(ranks, rank, phase, "SIGSTOP").values():
        assert status == "error" and f"rank {rank} did not s" in text, text
    os.kill(ranks[rank].process.pid, signal.SIGCONT)
    assert ranks[rank].pipe.poll(ANSWER_S)
    status, text = ranks[rank].pipe.recv()
    if rank != 0:
        assert status == "error" and "did not s" in text, text
    time.sleep(0.2)
    works(ranks, 2)


def test_ranks_that_were_given_other_terms_serve_nothing(ranks: list[Child]) -> None:
    """All hear who differs, before any of them has begun."""
    for r, child in enumerate(ranks):
        child.tell("sync", ("", "", [r % 2]))
    for status, text in endings(ranks).values():
        assert status == "error" and "trainer rank 1" in text, text
        assert "it was given terms [1], rank 0 [0]: give every rank the same" in text
    for child in ranks:
        child.tell("served")
    assert list(collect(ranks, ANSWER_S).values()) == [[], [], []]
    works(ranks, 1)


def test_ranks_that_gave_up_take_part_again(ranks: list[Child]) -> None:
    """Rank 0 comes too late: it is told so instead of waiting for them, and the next sync works."""
    for child in ranks[1:]:
        child.tell("sync", NOTHING)
    for status, text in endings(ranks[1:]).values():
        assert status == "error" and "trainer rank 0 did not say 'go' within" in text, text
    ranks[0].tell("sync", NOTHING)
    status, text = endings(ranks[:1])["rank 0"]
    assert status == "error" and "gave up: trainer rank 0 did not say 'go' within" in text, text
    works(ranks, 1)


def test_ranks_that_called_more_often_than_rank_0_find_it_again(ranks: list[Child]) -> None:
    """They have failed once more than rank 0, and take the number from it: retries come together."""
    for child in ranks[1:]:
        child.tell("sync", NOTHING)
    assert {status for status, _ in endings(ranks[1:]).values()} == {"error"}
    for child in ranks[1:] + ranks[:1]:
        child.tell("insist")
    assert len({number for _, (_, number) in endings(ranks).values()}) == 1


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for all ranks, a stranger does not count as one, and the deadline names who is missing."""
    monkeypatch.setattr("rdtexec.ranks.CONNECT_TIMEOUT_S", 2.0)
    first = Ranks(0, 3, authkey=KEY, stall_timeout_s=STALL_S)
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(first.address)
    other = Ranks(2, 3, authkey=KEY, stall_timeout_s=STALL_S)
    joining = threading.Thread(target=other.connect, args=(first.address,))
    joining.start()
    with pytest.raises(TransferError, match=r"RDT604: trainer ranks \[1\] did not connect"):
        first.connect(None)
    joining.join(30)
    first.close()
    other.close()
    stranger.close()
