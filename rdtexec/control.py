"""Control messages between one consumer and one producer: small JSON objects over a stream socket.

Data never travels here; a message names a chunk or a gather group of the sealed plan and nothing per slice. A closed
peer is seen at once (TransferError RDT601); a stopped one fills the socket, so sends have a deadline of their own.
"""

from __future__ import annotations

import base64
import os
import socket
import struct
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import orjson

from rdtplan.errors import TransferError

MAX_MESSAGE_NBYTES = 16 << 20
SEND_TIMEOUT_S = 30
PLAN_PIECE_NBYTES = 4 << 20
Address = str | tuple[str, int]
"""Path of a Unix socket, or (host, port)."""
Message = dict[str, Any]


class Link:
    """One end of a connection. `send` may be called from any thread, `receive` from one."""

    def __init__(self, connection: Connection, peer: str) -> None:
        self.connection = connection
        self.peer = peer
        self._sending = threading.Lock()
        with socket.socket(fileno=_dup(connection)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message; TransferError when the peer is gone or does not read for 30 s."""
        data = orjson.dumps({"kind": kind, **fields})
        try:
            with self._sending:
                self.connection.send_bytes(data)
        except BlockingIOError:
            raise TransferError(
                f"{self.peer} has not read its messages for {SEND_TIMEOUT_S} s (sending {kind!r})",
                fix="look whether that process is stopped or its machine is overloaded",
                code="RDT602",
            ) from None
        except OSError as error:
            raise self.lost(f"sending {kind!r}", error) from None

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, None when there is none in time; TransferError when the peer is gone or talks nonsense."""
        try:
            if not self.connection.poll(timeout_s):
                return None
            message = orjson.loads(self.connection.recv_bytes(MAX_MESSAGE_NBYTES))
        except orjson.JSONDecodeError:
            raise TransferError(f"{self.peer} sent something that is no message", code="RDT603") from None
        except (OSError, EOFError) as error:
            raise self.lost("waiting for a message", error) from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise TransferError(f"{self.peer} sent a message without a kind", code="RDT603")
        return message

    def lost(self, doing: str, error: BaseException | None = None) -> TransferError:
        reason = f" ({type(error).__name__})" if error else ""
        return TransferError(
            f"{self.peer} is gone: its connection closed while {doing}{reason}",
            fix="look at that process's log; it died or was killed",
            code="RDT601",
        )

    def close(self) -> None:
        self.connection.close()


def _dup(connection: Connection) -> int:
    return os.dup(connection.fileno())


def dial(address: Address, peer: str, *, authkey: bytes, timeout_s: float) -> Link:
    """Connect to a producer, retrying until `timeout_s`; TransferError RDT604 names the peer and the address."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return Link(Client(address, authkey=authkey), peer)
        except AuthenticationError:
            raise TransferError(
                f"{peer} at {address} does not accept this worker's key",
                fix="both ends must be given the same authkey",
                code="RDT604",
            ) from None
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise TransferError(
                    f"no connection to {peer} at {address} within {timeout_s:.0f} s: {error}",
                    fix="start that producer, or correct its address",
                    code="RDT604",
                ) from None
            time.sleep(0.02)


def listen(address: Address | None, *, authkey: bytes) -> Listener:
    """A listening socket; None chooses a Unix socket in a private temporary directory."""
    return Listener(address, family="AF_UNIX" if address is None else None, backlog=1024, authkey=authkey)


def fetch_plan(address: Address, *, authkey: bytes, timeout_s: float) -> bytes:
    """The fleet plan file that a producer was made with, as bytes; TransferError when it has none."""
    link = dial(address, "the producer", authkey=authkey, timeout_s=timeout_s)
    try:
        link.send("plan")
        found = b""
        while True:
            answer = link.receive(timeout_s)
            if answer is None or answer["kind"] != "plan":
                raise TransferError(
                    f"{link.peer} at {address} did not send its plan: {(answer or {}).get('reason', 'no answer')}",
                    fix="give the workers the path of the plan",
                    code="RDT608",
                )
            found += base64.b64decode(answer["data"])
            if not answer["more"]:
                return found
    finally:
        link.close()


def send_plan(link: Link, data: bytes) -> None:
    """The other end of `fetch_plan`."""
    for at in range(0, max(len(data), 1), PLAN_PIECE_NBYTES):
        piece = data[at : at + PLAN_PIECE_NBYTES]
        more = at + PLAN_PIECE_NBYTES < len(data)
        link.send("plan", data=base64.b64encode(piece).decode(), more=more)
