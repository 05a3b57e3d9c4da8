"""The scatter: from landed bytes to finished modules, behind the pulls.

Two threads. The first materializes the modules that a chunk is the first to touch, writes their constants, enqueues
the copies on a stream of its own, records read-done, publishes the slot, and hands the modules that the chunk
completes to the second, which runs their post-processing (quantize, copy to kernel storage) on its own stream, ordered
after the copies by an event.

Invariants: chunks are scattered in the order they were submitted, and completions follow that order; `done` is called
when the copies are, on a GPU by the second thread after the event; both streams begin after what the caller's stream
holds at `reset`; a failed item still publishes its slot; an error surfaces once, on the next call, with its cause;
after an error later items only publish.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from attrs import frozen

from rdtexec.copies import Copy
from rdtexec.device import make_lane, record_now
from rdtexec.pool import Slot
from rdtplan.errors import RdtError, TransferError

CLOSE_TIMEOUT_S = 30.0
COMPLETIONS = 2
"""Chunks that may wait for completion; the scatter goes no further ahead, as modules have memory twice until then."""


class ModuleHooks(Protocol):
    """What happens to a leaf module around its scatters; modules are indices into the plan's `module_names`."""

    def materialize(self, module: int) -> None:
        """Before the first write: give the module memory to write to, and its constants."""

    def complete(self, module: int) -> None:
        """After the last write: post-processing."""


@frozen
class ScatterJob:
    """One landed chunk.

    `copies()` gives the copy to be run; `done` runs when all of it has been written.
    """

    label: str
    copies: Callable[[], Copy]
    first: tuple[int, ...]
    last: tuple[int, ...]
    slot: Slot | None
    done: Callable[[], None]
    check: Callable[[Sequence[torch.Tensor]], None] | None = None
    """Looks at the destination views after the copies and raises when they are wrong."""


class Scatterer:
    """Runs scatter jobs in the background on the device of the destination."""

    def __init__(self, device: torch.device, hooks: ModuleHooks) -> None:
        self._device = device
        self._hooks = hooks
        self._jobs: queue.Queue[ScatterJob | None] = queue.Queue()
        self._completions: queue.Queue[tuple[ScatterJob, Any] | None] = queue.Queue(COMPLETIONS)
        self._lock = threading.Condition()
        self._error: BaseException | None = None
        self._broken = False
        self._begin: Any = None
        """The end of the caller's work when the sync began; None on CPU."""
        self._open_jobs = 0
        self.scatter_s = 0.0
        """Seconds spent in copies since the last `reset_clock`."""
        self.complete_s = 0.0
        self.stuck = False
        """Is a thread still at work that was told to stop?"""
        self._threads = [
            threading.Thread(target=self._scatter_loop, name="rdtexec-scatter", daemon=True),
            threading.Thread(target=self._complete_loop, name="rdtexec-complete", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: ScatterJob) -> None:
        """Queue a chunk. Raises the error of an earlier one, once."""
        self._raise_error()
        if job.slot is not None:
            job.slot.queue()
        with self._lock:
            self._open_jobs += 1
        self._jobs.put(job)

    def check(self) -> None:
        """Raise the error of an earlier job, once."""
        self._raise_error()

    def drain(self, timeout_s: float) -> None:
        """Wait for all submitted chunks and their completions; TransferError RDT621 after `timeout_s` seconds."""
        with self._lock:
            finished = self._lock.wait_for(lambda: self._open_jobs == 0, timeout_s)
            left = self._open_jobs
        self._raise_error()
        if not finished:
            raise TransferError(
                f"{left} scattered chunks were not finished after {timeout_s:.0f} s",
                fix="the device is stuck or post-processing hangs; the process must be restarted",
                code="RDT621",
            )
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def cancel(self, timeout_s: float) -> None:
        """The sync failed: what is queued only publishes its slots; waits for what is being written now."""
        with self._lock:
            self._broken = True
            self.stuck = not self._lock.wait_for(lambda: self._open_jobs == 0, timeout_s)
            self._error = None

    def reset(self) -> None:
        """A sync begins. The caller has drained."""
        with self._lock:
            self.scatter_s = self.complete_s = 0.0
            self._begin = record_now(self._device)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Stop both threads within `timeout_s` seconds; False when one is stuck (its memory must then not be freed)."""
        deadline = time.monotonic() + timeout_s
        self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.stuck = self.stuck or any(thread.is_alive() for thread in self._threads)
        return not self.stuck

    def _raise_error(self) -> None:
        with self._lock:
            error, self._error = self._error, None
        if error is None:
            return
        if isinstance(error, RdtError):
            raise error
        raise TransferError(f"{error.__notes__[0]}: {type(error).__name__}: {error}", code="RDT620") from error

    def _fail(self, error: BaseException, where: str) -> None:
        error.add_note(where)
        with self._lock:
            self._broken = True
            if self._error is None:
                self._error = error

    def _finish(self) -> None:
        with self._lock:
            self._open_jobs -= 1
            self._lock.notify_all()

    def _scatter_loop(self) -> None:
        lane = make_lane(self._device)
        while (job := self._jobs.get()) is not None:
            event: Any = None
            started = time.perf_counter()
            try:
                if not self._broken:
                    lane.after(self._begin)
                    with lane.enter(), torch.no_grad():
                        for module in job.first:
                            self._hooks.materialize(module)
                        copy = job.copies()
                        copy.run()
                        if job.check is not None:
                            job.check(copy.written())
                    event = lane.record()
            except BaseException as error:
                self._fail(error, f"scattering {job.label} failed")
            finally:
                if job.slot is not None:
                    job.slot.publish(event)
            self.scatter_s += time.perf_counter() - started
            if event is None:
                self._signal(job)
            self._completions.put((job, event))
        self._completions.put(None)

    def _signal(self, job: ScatterJob) -> None:
        try:
            if not self._broken:
                job.done()
        except BaseException as error:
            self._fail(error, f"signalling after {job.label} failed")

    def _complete_loop(self) -> None:
        lane = make_lane(self._device)
        while (item := self._completions.get()) is not None:
            job, event = item
            if event is not None:
                self._await(job, event)
                self._signal(job)
            started = time.perf_counter()
            try:
                if not self._broken and job.last:
                    lane.after(event)
                    with lane.enter(), torch.no_grad():
                        for module in job.last:
                            self._hooks.complete(module)
            except BaseException as error:
                self._fail(error, f"post-processing after {job.label} failed")
            self.complete_s += time.perf_counter() - started
            self._finish()

    def _await(self, job: ScatterJob, event: Any) -> None:
        try:
            event.synchronize()
        except BaseException as error:
            self._fail(error, f"scattering {job.label} failed")
