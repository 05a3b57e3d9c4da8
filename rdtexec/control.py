"""Control messages between one consumer and one producer: small JSON objects over a stream socket.

Data never travels here; a message names a chunk or a gather group of the sealed plan and nothing per slice. A closed
peer is seen at once (TransferError RDT601). A stopped one, or a stranger that says half a message and no more, closes
nothing: every single read and write of a socket has a deadline of its own, the handshake of a new connection included.
"""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

import orjson

from rdtplan.errors import InputError, RdtError, TransferError

MAX_MESSAGE_NBYTES = 16 << 20
SEND_TIMEOUT_S = 30
RECEIVE_TIMEOUT_S = 5
"""For the rest of a message that has begun to arrive, and for each step of the handshake with a stranger."""
PIECE_NBYTES = 4 << 20
Address = str | tuple[str, int]
"""Path of a Unix socket, or (host, port)."""
Message = dict[str, Any]


class Link:
    """One end of a connection. `send` may be called from any thread, `receive` from one."""

    def __init__(self, connection: Connection, peer: str) -> None:
        self.connection = connection
        self.peer = peer
        self._sending = threading.Lock()
        _set_deadlines(connection, SEND_TIMEOUT_S, RECEIVE_TIMEOUT_S)

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message; TransferError when the peer is gone or does not read for 30 s."""
        data = orjson.dumps({"kind": kind, **fields})
        try:
            with self._sending:
                self.connection.send_bytes(data)
        except BlockingIOError:
            self._shut_down()  # half a message may have gone out: nothing that follows can be understood
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
        except BlockingIOError:
            raise TransferError(
                f"{self.peer} sent the beginning of a message and not the rest within {RECEIVE_TIMEOUT_S} s",
                fix="look whether that process is stopped",
                code="RDT603",
            ) from None
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
        """Hang up. A send under way in another thread ends first, so that it never writes to a descriptor used anew."""
        if not self.connection.closed:
            self._shut_down()
            with self._sending:
                self.connection.close()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError), _socket(self.connection) as sock:
            sock.shutdown(socket.SHUT_RDWR)


def _socket(connection: Connection) -> socket.socket:
    """Another descriptor of the connection's socket; closing it leaves the connection open."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def _set_deadlines(connection: Connection, send_s: float, receive_s: float) -> None:
    with _socket(connection) as sock:
        for option, seconds in ((socket.SO_SNDTIMEO, send_s), (socket.SO_RCVTIMEO, receive_s)):
            whole, part = divmod(max(seconds, 0.001), 1)  # 0 would mean for ever
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole), int(part * 1e6)))


def dial(address: Address, peer: str, *, authkey: bytes, timeout_s: float) -> Link:
    """Connect to a producer, retrying until `timeout_s`; TransferError RDT604 names the peer and the address."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return Link(_connected(address, authkey, max(0.0, deadline - time.monotonic())), peer)
        except AuthenticationError:
            raise TransferError(
                f"{peer} at {address} does not accept this worker's key",
                fix="both ends must be given the same authkey",
                code="RDT604",
            ) from None
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                silent = isinstance(error, (TimeoutError, BlockingIOError))
                reason = "it accepts connections and does not answer" if silent else error
                raise TransferError(
                    f"no connection to {peer} at {address} within {timeout_s:.0f} s: {reason}",
                    fix="look whether that producer is stopped" if silent else "start it, or correct its address",
                    code="RDT604",
                ) from None
            time.sleep(0.02)


def _connected(address: Address, authkey: bytes, timeout_s: float) -> Connection:
    """One try; a peer that is stopped lets us connect, so the handshake needs the deadline too."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(max(timeout_s, 0.001))
        sock.connect(address)
        sock.setblocking(True)
        connection = Connection(sock.detach())
    try:
        _set_deadlines(connection, timeout_s, timeout_s)
        answer_challenge(connection, authkey)
        deliver_challenge(connection, authkey)
    except BaseException:
        connection.close()
        raise
    return connection


def listen(address: Address | None) -> Listener:
    """A listening socket; None chooses a Unix socket in a private temporary directory.

    InputError RDT115 when the address is taken or not of this machine.
    """
    try:
        return Listener(address, family="AF_UNIX" if address is None else None, backlog=1024)
    except OSError as error:
        raise InputError(
            f"cannot listen at {address}: {error}",
            fix="give an address of this machine that is free; port 0 takes any",
            code="RDT115",
        ) from None


def welcome_forever(
    listener: Listener, authkey: bytes, admit: Callable[[Connection], None], closed: Callable[[], bool]
) -> None:
    """Accept connections until `closed()`; `admit` gets, in a thread of its own, each that knows the key.

    The handshake runs in that thread too: somebody who connects and then stays silent keeps nobody else out.
    """
    while not closed():
        try:
            connection = listener.accept()
        except OSError:  # out of descriptors, or the end
            time.sleep(0.05)
            continue
        threading.Thread(
            target=_shake_hands, args=(connection, authkey, admit), name="rdtexec-handshake", daemon=True
        ).start()


def stop_welcoming(listener: Listener) -> None:
    """End `welcome_forever`, whose `closed()` is true by now: `accept` cannot be interrupted, but be connected to."""
    address = listener.address
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(1)
        sock.connect(address)


def _shake_hands(connection: Connection, authkey: bytes, admit: Callable[[Connection], None]) -> None:
    try:
        _set_deadlines(connection, RECEIVE_TIMEOUT_S, RECEIVE_TIMEOUT_S)
        deliver_challenge(connection, authkey)
        answer_challenge(connection, authkey)
        admit(connection)
    except (OSError, EOFError, AuthenticationError, RdtError):  # a stranger
        connection.close()


def fetch_plan(address: Address, *, authkey: bytes, timeout_s: float) -> bytes:
    """The fleet plan file that a producer was made with, as bytes; TransferError when it has none."""
    link = dial(address, "the producer", authkey=authkey, timeout_s=timeout_s)

    def refused(answer: Message | None) -> TransferError:
        return TransferError(
            f"{link.peer} at {address} did not send its plan: {(answer or {}).get('reason', 'no answer')}",
            fix="give the workers the path of the plan",
            code="RDT608",
        )

    try:
        link.send("plan")
        return receive_bytes(link, "plan", timeout_s, refused)
    finally:
        link.close()


def send_bytes(link: Link, kind: str, data: bytes) -> None:
    """Send `data`, in as many messages as it takes; `receive_bytes` is the other end."""
    for at in range(0, max(len(data), 1), PIECE_NBYTES):
        piece = data[at : at + PIECE_NBYTES]
        more = at + PIECE_NBYTES < len(data)
        link.send(kind, data=base64.b64encode(piece).decode(), more=more)


def receive_bytes(link: Link, kind: str, timeout_s: float, refused: Callable[[Message | None], Exception]) -> bytes:
    """What `send_bytes` sent, `timeout_s` for each message; raises `refused` of what came instead, None for nothing."""
    found = bytearray()
    while True:
        answer = link.receive(timeout_s)
        if answer is None or answer["kind"] != kind:
            raise refused(answer)
        found += base64.b64decode(answer["data"])
        if not answer["more"]:
            return bytes(found)
