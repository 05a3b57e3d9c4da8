"""The lane scheduler: which pull is issued when, and when a landed pull is handed on. Effects are injected.

The invariants, and why they hold:

- Pulls of one stream are issued in plan order, because a lane works one stream at a time from front to back.
  All chunks of a producer are in one stream, so its serve slots are reused in issue order.
- At most `window` pulls are in flight a lane, and they drain in the order they were issued (FIFO).
- A slot is handed to a pull only when `slot_free` says so; lanes own disjoint slots and use them round robin.
- It terminates: each turn issues, drains, or waits for an effect that has its own deadline and raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from attrs import define, field, frozen

RECHECK_S = 0.005
"""A lane that waits for its slot while others have pulls in flight looks again after this many seconds."""


@frozen(slots=True)
class Pull:
    """One chunk on its way: which, on which lane, into which of the lane's slots."""

    chunk: int
    lane: int
    slot: int


class Effects(Protocol):
    """What the scheduler asks of the world. Every call that waits raises at its deadline."""

    def slot_free(self, lane: int, slot: int) -> bool:
        """May this slot be overwritten?"""

    def issue(self, pull: Pull) -> None:
        """Start a pull; returns at once."""

    def landed(self, pull: Pull) -> bool:
        """Have all bytes of the pull arrived?"""

    def drain(self, pull: Pull) -> None:
        """Hand a landed pull to the scatter; returns at once."""

    def wait(self, timeout_s: float | None) -> None:
        """Block until a pull may have landed or a slot may be free, at most `timeout_s` seconds."""


@define
class _Lane:
    index: int
    pending: Iterator[int]
    ahead: int | None = None
    inflight: deque[Pull] = field(factory=deque)
    turn: int = 0


def run(streams: Sequence[Sequence[int]], *, lanes: int, window: int, slots: int, effects: Effects) -> int:
    """Pull every chunk of every stream; returns the number drained.

    `lanes` streams are worked on at once, `window` pulls in flight each, over `slots` slots a lane
    (1 <= `window` <= `slots`). Every lane begins with a stream of its own, and takes the next unstarted one
    right after the last chunk of its current one.
    """
    waiting = deque(s for s in streams if s)
    workers = [_Lane(i, iter(waiting.popleft())) for i in range(min(max(1, lanes), len(waiting)))]
    drained = 0
    while True:
        moved = blocked = False
        for lane in workers:
            while len(lane.inflight) < window and _next(lane, waiting) is not None:
                slot = lane.turn % slots
                if not effects.slot_free(lane.index, slot):
                    blocked = True
                    break
                assert lane.ahead is not None
                pull = Pull(lane.ahead, lane.index, slot)
                effects.issue(pull)
                lane.inflight.append(pull)
                lane.turn += 1
                lane.ahead = None
                _next(lane, waiting)
                moved = True
        for lane in workers:
            while lane.inflight and effects.landed(lane.inflight[0]):
                effects.drain(lane.inflight.popleft())
                drained += 1
                moved = True
        if moved:
            continue
        busy = any(lane.inflight for lane in workers)
        if not busy and not blocked:
            return drained
        effects.wait(RECHECK_S if blocked and busy else None)


def _next(lane: _Lane, waiting: deque[Sequence[int]]) -> int | None:
    """The chunk this lane issues next, taking a new stream when its own is used up."""
    while lane.ahead is None:
        lane.ahead = next(lane.pending, None)
        if lane.ahead is None:
            if not waiting:
                return None
            lane.pending = iter(waiting.popleft())
    return lane.ahead


def streams_of(stream_column: Sequence[int]) -> list[list[int]]:
    """Chunk indices of every stream, streams by number, chunks in plan order."""
    found: dict[int, list[int]] = {}
    for chunk, stream in enumerate(stream_column):
        found.setdefault(stream, []).append(chunk)
    return [found[s] for s in sorted(found)]
