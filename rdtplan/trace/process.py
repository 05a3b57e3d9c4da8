"""Tracing for a target: in this process where it is of that target, else in one of its own, which becomes it.

The other process is a fresh Python. It gets the request on its standard input and answers with messages on a pipe of
its own, since what it imports prints: progress, then the trace or the error. Both ends are this program, so messages
are pickled; no plan and nothing from outside is ever read that way.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from rdtplan.errors import RdtError, TraceError
from rdtplan.ir.targets import AUTO, check_target
from rdtplan.trace import platform
from rdtplan.trace.dry_run import FleetTrace, TraceRequest, trace_fleet
from rdtplan.trace.parent import end_with_parent

Progress = Callable[[int, int], None] | None


def trace_for_target(request: TraceRequest, *, jobs: int | None = None, progress: Progress = None) -> FleetTrace:
    """Trace a whole deployment for `request.target`; `auto` is the platform of this process.

    InputError RDT116 for an unknown target; what the other process raises is raised here.
    """
    if request.target == AUTO or platform.is_here(request.target):
        platform.prefer_cpu()
        return trace_fleet(request, jobs=jobs, progress=progress)
    check_target(request.target)
    result: FleetTrace | None = None
    for kind, value in _messages(request, jobs):
        if kind == "progress" and progress:
            progress(*value)
        elif kind == "error":
            raise value
        elif kind == "trace":
            result = value
    if result is None:
        raise TraceError(
            f"the process that traces for target {request.target!r} died without an answer",
            fix="its last words are on standard error; a process killed for memory leaves none",
            code="RDT217",
        )
    return result


def _messages(request: TraceRequest, jobs: int | None) -> Iterator[tuple[str, Any]]:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(writing)],
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno() if hasattr(sys.stderr, "fileno") else None,
        pass_fds=(writing,),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    os.close(writing)
    assert process.stdin is not None
    try:
        with process.stdin as given, open(reading, "rb") as answers:
            pickle.dump((request, jobs), given)
            given.close()
            while True:
                try:
                    yield pickle.load(answers)
                except EOFError:
                    return
    except BrokenPipeError:  # it died before it read; there is no answer
        return
    finally:
        process.kill() if sys.exc_info()[0] is not None else None
        process.wait()


def main() -> None:
    """The other process."""
    end_with_parent()
    with open(int(sys.argv[1]), "wb") as answers:

        def answer(kind: str, value: Any) -> None:
            pickle.dump((kind, value), answers)
            answers.flush()

        request, jobs = pickle.load(sys.stdin.buffer)
        try:
            platform.install(request.target)
            found = trace_fleet(request, jobs=jobs, progress=lambda done, total: answer("progress", (done, total)))
            answer("trace", found)
        except RdtError as error:
            answer("error", error)
        except Exception as error:
            answer(
                "error",
                TraceError(
                    f"tracing for target {request.target!r} failed: {type(error).__name__}: {error}\n"
                    + "".join(traceback.format_tb(error.__traceback__)[-3:]),
                    code="RDT217",
                ),
            )


if __name__ == "__main__":
    main()
