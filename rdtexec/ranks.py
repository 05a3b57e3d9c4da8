"""What the ranks of a trainer tell each other around a sync: that they have come, how it went, and that it is over.

Rank 0 drives the inference side, so it alone knows when the workers are ready and whether they finished. The others
wait for its word, serve, and report; all of them then succeed or fail together, with one reason. In a sync

- another rank says *come*, rank 0 *go* with the number and the terms, the other *here*, or what it was told otherwise;
- when all are here, and the workers ready, rank 0 says *serve*, and each answers with its *result*;
- rank 0 says *over*, at any time when something has failed.

A rank that gives up says *left*, so that rank 0 does not wait for it. These messages go over
sockets of their own and not through a collective: a rank that died closes its socket and is named at once, one that is
stopped is named at a deadline, and neither can hang the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

from rdtexec.control import Address, Link, Message, dial, listen, stop_welcoming, welcome_forever
from rdtplan.errors import RdtError, TransferError

CONNECT_TIMEOUT_S = 60.0
PATIENCE = 2.5
"""The others wait so many deadlines for rank 0's last word: it may wait one for the transfer and one for the workers'
answer, and it knows who is to blame."""


class Ranks:
    """One rank's end. Rank 0 is made first; its `address` is how the others reach it."""

    def __init__(self, rank: int, world: int, *, authkey: bytes, stall_timeout_s: float, where: Address | None = None):
        self._rank, self._world, self._authkey = rank, world, authkey
        self._timeout_s = stall_timeout_s
        self._syncs = 0
        """Counts the syncs of rank 0, failed ones too."""
        self._gave_up = False
        """Has this rank last waited for rank 0 in vain?"""
        self._links: dict[int, Link] = {}
        self._met = threading.Condition()
        self._closed = False
        self._listener: Listener | None = None
        if rank == 0 and world > 1:
            self._listener = listen(where)

    @property
    def address(self) -> Address | None:
        """Where rank 0 listens."""
        return self._listener.address if self._listener else None

    def connect(self, address: Address | None) -> None:
        """Called on every rank, with rank 0's address; TransferError RDT604 when ranks are missing after a minute."""
        if self._listener is not None:
            accepting = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
            accepting.start()
            with self._met:
                self._met.wait_for(lambda: len(self._links) == self._world - 1, CONNECT_TIMEOUT_S)
            missing = sorted(set(range(1, self._world)) - self._links.keys())
            if missing:
                raise TransferError(
                    f"trainer ranks {missing[:8]} did not connect to rank 0 within {CONNECT_TIMEOUT_S:.0f} s",
                    fix="look at the logs of those ranks",
                    code="RDT604",
                )
        elif self._world > 1:
            assert address is not None
            link = dial(address, "trainer rank 0", authkey=self._authkey, timeout_s=CONNECT_TIMEOUT_S)
            link.send("rank", rank=self._rank)
            self._links[0] = link

    def _accept(self, listener: Listener) -> None:
        welcome_forever(
            listener, self._authkey, self._meet, lambda: self._closed or len(self._links) == self._world - 1
        )

    def _meet(self, connection: Connection) -> None:
        link = Link(connection, "a trainer rank")
        rank = int(_expect(link, "rank", CONNECT_TIMEOUT_S)["rank"])
        link.peer = f"trainer rank {rank}"
        with self._met:
            self._links[rank] = link
            self._met.notify_all()

    def together(
        self,
        ready: Callable[[], None],
        serve: Callable[[int], Any],
        finish: Callable[[], None],
        terms: Mapping[str, Any],
    ) -> Any:
        """One sync over all ranks; `ready` and `finish` run on rank 0, `serve` on every rank, with the sync's number.

        The number is rank 0's: a rank that comes late, or has given up before, takes part in whichever sync rank 0
        begins. Nobody serves before all have come and were given the same `terms`. Returns what `serve` returned.
        TransferError on every rank when anything failed on any of them.
        """
        return self._lead(ready, serve, finish, terms) if self._rank == 0 else self._follow(serve, terms)

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def _lead(
        self,
        ready: Callable[[], None],
        serve: Callable[[int], Any],
        finish: Callable[[], None],
        terms: Mapping[str, Any],
    ) -> Any:
        sync, self._syncs = self._syncs, self._syncs + 1
        try:
            self._tell("go", sync, terms=terms)
            self._collect(sync, "here")
            ready()
            self._check_all_wait(sync)
            self._tell("serve", sync)
            served = serve(sync)
            self._collect(sync, "result")
            finish()
            self._check_all_wait(sync)
        except BaseException as error:
            with contextlib.suppress(RdtError):  # the first error is the one to be told
                self._tell("over", sync, error=f"trainer rank 0: {_words(error)}")
            raise
        self._tell("over", sync)
        return served

    def _tell(self, kind: str, sync: int, **fields: Any) -> None:
        """Tell every rank, those behind one that is gone too; then TransferError about the first that is."""
        gone: RdtError | None = None
        for link in self._links.values():
            try:
                link.send(kind, sync=sync, **fields)
            except RdtError as error:
                gone = gone or error
        if gone is not None:
            raise gone

    def _collect(self, sync: int, kind: str) -> None:
        """Every other rank's word on this sync; TransferError when it is no good, or does not come in time."""
        deadline = time.monotonic() + self._timeout_s
        pending = dict(self._links)
        while pending:
            left = max(0.0, deadline - time.monotonic())
            if not wait([link.connection for link in pending.values()], left):
                raise _silent(next(iter(pending.values())), kind)
            for rank in self._heard(sync, kind):
                pending.pop(rank, None)

    def _check_all_wait(self, sync: int) -> None:
        """TransferError when one of the others is gone, or has given up, while it was rank 0's turn."""
        self._heard(sync, "")

    def _heard(self, sync: int, kind: str) -> list[int]:
        """Ranks that have said this about this sync by now; what they said about older ones is dropped.

        TransferError about the first that is gone, has given up, or reports an error; all were listened to by then.
        """
        found: list[int] = []
        errors: list[RdtError] = []
        for rank, link in sorted(self._links.items()):
            try:
                if self._has_said(link, sync, kind):
                    found.append(rank)
            except RdtError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return found

    def _has_said(self, link: Link, sync: int, kind: str) -> bool:
        gave_up = ""
        while (message := link.receive(0)) is not None:
            if message["kind"] == "come":  # it may come again before a sync, not in it
                gave_up = "" if kind == "here" else gave_up or "it has called send_weights anew"
            elif message["kind"] == "left" and message["sync"] in (sync, None):
                gave_up = message["reason"]
            elif message["kind"] == kind and message["sync"] == sync:
                if message["error"]:
                    raise TransferError(f"sync {sync} failed on {link.peer}: {message['error']}", code="RDT606")
                return True
        if gave_up:
            raise TransferError(f"sync {sync}: {link.peer} gave up: {gave_up}", code="RDT606")
        return False

    # -- the others ----------------------------------------------------------------------------------------------------

    def _follow(self, serve: Callable[[int], Any], terms: Mapping[str, Any]) -> Any:
        first = self._links[0]
        first.send("come")
        go = self._await_go()
        sync = go["sync"]
        first.send("here", sync=sync, error=_difference(terms, go["terms"]))
        self._await(sync, "serve")
        try:
            served = serve(sync)
        except Exception as error:
            first.send("result", sync=sync, error=_words(error))
            raise
        first.send("result", sync=sync, error="")
        self._await(sync, "over")
        return served

    def _await_go(self) -> Message:
        """Rank 0's next sync, which may have begun already; TransferError with its reason when it has even failed.

        A rank that has given up has failed once itself: for it, those that are over by now are past.
        """
        link = self._links[0]
        begun: Message | None = None
        failed: Message | None = None
        while (message := link.receive(0)) is not None:
            if message["kind"] == "go":
                begun, failed = message, None
            elif message["kind"] == "over" and begun is not None:
                begun, failed = None, message
        if failed is not None and not self._gave_up:
            raise _failed(failed)
        deadline = time.monotonic() + self._timeout_s
        while begun is None:
            message = link.receive(max(0.0, deadline - time.monotonic()))
            if message is None:
                self._gave_up = True
                raise self._given_up("go", self._timeout_s)
            if message["kind"] == "go":
                begun = message
        self._gave_up = False
        return begun

    def _await(self, sync: int, kind: str) -> None:
        """Rank 0's word on this sync; TransferError with its reason when it gave up."""
        patience = self._timeout_s * PATIENCE
        deadline = time.monotonic() + patience
        while True:
            message = self._links[0].receive(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise self._given_up(kind, patience, sync)
            if message.get("sync") != sync:
                continue
            if message.get("error"):
                raise _failed(message)
            if message["kind"] == kind:
                return

    def _given_up(self, kind: str, patience_s: float, sync: int | None = None) -> TransferError:
        """Tell rank 0 that this rank waits no longer, lest it wait for this one; the error to raise here."""
        what = f"trainer rank 0 did not say {kind!r} within {patience_s:.1f} s"
        with contextlib.suppress(RdtError):
            self._links[0].send("left", sync=sync, reason=what)
        return TransferError(
            what if sync is None else f"sync {sync}: {what}",
            fix="every rank must call send_weights; look whether rank 0 is stopped or waits for the workers",
            code="RDT602",
        )

    def close(self) -> None:
        """Hang up."""
        self._closed = True
        for link in self._links.values():
            link.close()
        if self._listener is not None:
            stop_welcoming(self._listener)
            self._listener.close()


def _expect(link: Link, kind: str, timeout_s: float) -> Message:
    message = link.receive(max(0.0, timeout_s))
    if message is None or message["kind"] != kind:
        raise _silent(link, kind)
    return message


def _silent(link: Link, kind: str) -> TransferError:
    return TransferError(
        f"{link.peer} did not send {kind!r} in time",
        fix="every rank must call trainer_init and send_weights; look at the log of that rank",
        code="RDT602",
    )


def _failed(over: Message) -> TransferError:
    return TransferError(f"sync {over['sync']} failed on {over['error']}", code="RDT606")


def _difference(mine: Mapping[str, Any], of_rank_0: Mapping[str, Any]) -> str:
    """What this rank was given otherwise, in words; empty when nothing."""
    for name, value in mine.items():
        if value != of_rank_0.get(name):
            return f"it was given {name} {value}, rank 0 {of_rank_0.get(name)}: give every rank the same"
    return ""


def _words(error: BaseException) -> str:
    return error.message if isinstance(error, RdtError) else f"{type(error).__name__}: {error}"
