"""Runs the demo's processes: start, command, collect, and leave nothing behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from attrs import frozen

from rdtplan.errors import TransferError


@frozen
class Child:
    """One process and its command pipe."""

    name: str
    process: BaseProcess
    pipe: Connection

    def tell(self, command: str, argument: Any = None) -> None:
        self.pipe.send((command, argument))


def context() -> Any:
    """Processes are forked from a server that has imported vLLM once and run nothing."""
    ctx = multiprocessing.get_context("forkserver")
    ctx.set_forkserver_preload(["rdtexec.demo.preload"])
    return ctx


@contextlib.contextmanager
def children(
    ctx: Any, mains: dict[str, tuple[Callable[..., None], tuple[Any, ...]]], *, stop_timeout_s: float = 35.0
) -> Iterator[dict[str, Child]]:
    """Start processes by name; stop them at the end, by force if they do not stop by themselves."""
    started: dict[str, Child] = {}
    try:
        for name, (main, args) in mains.items():
            ours, theirs = ctx.Pipe()
            process = ctx.Process(target=main, args=(theirs, *args), name=name, daemon=True)
            process.start()
            theirs.close()
            started[name] = Child(name, process, ours)
        yield started
        for child in started.values():
            with contextlib.suppress(OSError):
                child.tell("stop")
        deadline = time.monotonic() + stop_timeout_s
        for child in started.values():
            child.process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for child in started.values():
            if child.process.is_alive():
                child.process.kill()
                child.process.join(5)
            child.pipe.close()


def collect(of: list[Child], timeout_s: float) -> dict[str, Any]:
    """One answer from each; TransferError when a process dies, reports an error, or is silent for `timeout_s`."""
    answers: dict[str, Any] = {}
    errors: list[str] = []
    deadline = time.monotonic() + timeout_s
    pending = {child.pipe: child for child in of}
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            names = ", ".join(c.name for c in pending.values())
            raise TransferError(f"no answer from {names} within {timeout_s:.0f} s", code="RDT602")
        for pipe in ready:
            child = pending.pop(pipe)  # type: ignore[call-overload]
            try:
                status, value = child.pipe.recv()
            except (EOFError, ConnectionResetError):  # reset: it died with a message of ours unread
                child.process.join(1)
                status, value = "error", f"{child.name} died with exit code {child.process.exitcode}"
            if status == "error":
                errors.append(f"{child.name}: {value}")
            else:
                answers[child.name] = value
    if errors:
        raise TransferError("\n".join(errors), code="RDT606")
    return answers


def new_authkey() -> bytes:
    """A secret for this run's control sockets."""
    return secrets.token_bytes(32)
