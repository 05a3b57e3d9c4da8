"""The receive pool: slots that pulls land in, and the handshake that guards them while they are read.

Invariant: a slot is reused only after (1) as many scatters have been done out of it as were queued, and (2)
the read-done event recorded for the last use has completed. `queue` is called by the scheduler's thread
before the scatter is handed on, `publish` by the scatter thread when it has recorded the event, in `finally`,
so that a failed scatter frees its slot too. Both counters only grow and are read under one condition, so
neither a late nor an early reader can see a slot free while a scatter still reads it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from attrs import frozen

from rdtexec.device import host_pages, page_lock_memory
from rdtplan.errors import TransferError


class Slot:
    """One receive buffer: `buffer` is a flat uint8 tensor."""

    def __init__(self, buffer: torch.Tensor, changed: threading.Condition) -> None:
        self.buffer = buffer
        self._changed = changed
        self._queued = 0
        self._done = 0
        self._read_done: Any = None

    def queue(self) -> None:
        """One more scatter will read this slot."""
        with self._changed:
            self._queued += 1

    def publish(self, read_done: Any) -> None:
        """A scatter has issued its last read; `read_done` completes with it (an event; None on CPU)."""
        with self._changed:
            self._done += 1
            self._read_done = read_done
            self._changed.notify_all()

    def free(self) -> bool:
        """May the slot be overwritten now?"""
        with self._changed:
            if self._done != self._queued:
                return False
            return self._read_done is None or bool(self._read_done.query())


@frozen
class PoolGeometry:
    """What a receive pool is made of; it stays for as long as workers run."""

    lanes: int
    slots_per_lane: int
    slot_nbytes: int
    staging: str
    """`gpu`, the worker's own device, or `host`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.lanes * self.slots_per_lane * self.slot_nbytes

    def __str__(self) -> str:
        return (
            f"{self.lanes} lanes of {self.slots_per_lane} slots of {self.slot_nbytes:,} bytes (staging {self.staging})"
        )


class ReceivePool:
    """Slots of exactly the geometry's size, in one allocation on the worker's device, or page-locked in host memory."""

    def __init__(self, geometry: PoolGeometry, device: torch.device) -> None:
        """TransferError RDT610 with the exact bytes asked for when the memory is not there."""
        self.geometry = geometry
        page_lock = geometry.staging == "host" and device.type == "cuda"
        where = torch.device("cpu") if page_lock else device
        try:
            if page_lock:
                self.memory = host_pages(geometry.nbytes)
                page_lock_memory(self.memory)
            else:
                self.memory = torch.empty(geometry.nbytes, dtype=torch.uint8, device=where)
        except (RuntimeError, MemoryError, OSError, ValueError) as error:
            raise TransferError(
                f"the receive pool does not fit: {geometry.nbytes:,} bytes on {where} for {geometry}: "
                f"{str(error).splitlines()[0][:160]}",
                fix="compile with a smaller --max-chunk-mb, or lower num_rdt_buffers or stages_in_flight",
                code="RDT610",
            ) from None
        self.changed = threading.Condition()
        """Notified whenever a slot may have become free."""
        self.slots = [
            [
                Slot(self.memory[i * geometry.slot_nbytes : (i + 1) * geometry.slot_nbytes], self.changed)
                for i in range(lane * geometry.slots_per_lane, (lane + 1) * geometry.slots_per_lane)
            ]
            for lane in range(geometry.lanes)
        ]

    def renewed(self) -> ReceivePool:
        """The same memory with slots that nobody has used yet, for the next consumer."""
        fresh = ReceivePool.__new__(ReceivePool)
        fresh.geometry, fresh.memory, fresh.changed = self.geometry, self.memory, threading.Condition()
        fresh.slots = [[Slot(slot.buffer, fresh.changed) for slot in lane] for lane in self.slots]
        return fresh
