"""What the ranks of a trainer tell each other around a sync: go, how it went, and that it is over.

Rank 0 drives the inference side, so it alone knows when the workers are ready and whether they finished. The others
wait for its word, serve, and report; all of them then succeed or fail together, with one reason. These messages go over
sockets of their own and not through a collective: a rank that died closes its socket and is named at once, one that is
stopped is named at a deadline, and neither can hang the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
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
        sync: int,
        ready: Callable[[], None],
        serve: Callable[[Any], Any],
        finish: Callable[[], None],
        terms: Any = None,
    ) -> Any:
        """One sync over all ranks; `ready` and `finish` run on rank 0, `serve` on every rank, with rank 0's `terms`.

        Returns what `serve` returned. TransferError on every rank when anything failed on any of them.
        """
        if self._rank == 0:
            return self._lead(sync, ready, serve, finish, terms)
        terms = self._await(sync, "go").get("terms")
        failure: BaseException | None = None
        served: Any = None
        try:
            served = serve(terms)
        except Exception as error:
            failure = error
        self._links[0].send("result", sync=sync, error="" if failure is None else _words(failure))
        if failure is not None:
            raise failure
        self._await(sync, "over")
        return served

    def _lead(
        self,
        sync: int,
        ready: Callable[[], None],
        serve: Callable[[Any], Any],
        finish: Callable[[], None],
        terms: Any,
    ) -> Any:
        try:
            ready()
            self._tell("go", sync, "", terms)
            served = serve(terms)
            self._collect(sync)
            finish()
            self._check_all_there()  # before anybody is told that it went well
        except BaseException as error:
            with contextlib.suppress(RdtError):  # the first error is the one to be told
                self._tell("over", sync, f"trainer rank 0: {_words(error)}")
            raise
        self._tell("over", sync, "")
        return served

    def _tell(self, kind: str, sync: int, error: str, terms: Any = None) -> None:
        """Tell every rank, those behind one that is gone too; then TransferError about the first that is."""
        gone: RdtError | None = None
        for link in self._links.values():
            try:
                link.send(kind, sync=sync, error=error, terms=terms)
            except RdtError as lost:
                gone = gone or lost
        if gone is not None:
            raise gone

    def _check_all_there(self) -> None:
        """TransferError about a rank that died while it was rank 0's turn. One that lives has nothing to say then."""
        for link in self._links.values():
            link.receive(0)

    def _collect(self, sync: int) -> None:
        """The other ranks' results of this sync; those of older ones are dropped."""
        deadline = time.monotonic() + self._timeout_s
        for rank in sorted(self._links):
            while (message := _expect(self._links[rank], "result", deadline - time.monotonic()))["sync"] != sync:
                pass
            if message["error"]:
                raise TransferError(f"sync {sync} failed on trainer rank {rank}: {message['error']}", code="RDT606")

    def _await(self, sync: int, kind: str) -> Message:
        """Rank 0's word on this sync; TransferError with its reason when it gave up."""
        patience = self._timeout_s * (PATIENCE if kind == "over" else 1)
        deadline = time.monotonic() + patience
        while True:
            message = self._links[0].receive(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise TransferError(
                    f"sync {sync}: trainer rank 0 did not say {kind!r} within {patience:.1f} s",
                    fix="every rank must call send_weights; look whether rank 0 is stopped or waits for the workers",
                    code="RDT602",
                )
            if message.get("sync") != sync:
                continue
            if message.get("error"):
                raise TransferError(f"sync {sync} failed on {message['error']}", code="RDT606")
            if message["kind"] == kind:
                return message

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
        raise TransferError(
            f"{link.peer} did not send {kind!r} in time",
            fix="every rank must call trainer_init and send_weights; look at the log of that rank",
            code="RDT602",
        )
    return message


def _words(error: BaseException) -> str:
    return error.message if isinstance(error, RdtError) else f"{type(error).__name__}: {error}"
