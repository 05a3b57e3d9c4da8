"""The lane scheduler in a simulated world: a virtual clock, landings in any order, slots that come back late."""

from __future__ import annotations

import random

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from rdtexec.schedule import RECHECK_S, Pull, run, streams_of


@define
class World:
    """Effects with a clock of their own. Every promise of the scheduler is checked when it acts."""

    streams: list[list[int]]
    lanes: int
    window: int
    slots: int
    dice: random.Random
    slowest_pull_s: float = 0.05
    slowest_scatter_s: float = 0.05
    now: float = 0.0
    lands_at: dict[Pull, float] = field(factory=dict)
    """Pulls in flight."""
    queues: dict[int, list[Pull]] = field(factory=dict)
    """Pulls in flight of each lane, in the order of issue."""
    frees_at: dict[tuple[int, int], float] = field(factory=dict)
    issued: list[Pull] = field(factory=list)
    drained: list[Pull] = field(factory=list)
    refused: bool = False
    """A busy slot was asked for since something last moved."""
    waits: list[float | None] = field(factory=list)
    current: dict[int, list[int]] = field(factory=dict)
    """What each lane has left of its stream."""
    unstarted: list[list[int]] = field(factory=list)
    most_inflight: int = 0

    def __attrs_post_init__(self) -> None:
        self.unstarted = [list(s) for s in self.streams if s]
        for lane in range(min(max(1, self.lanes), len(self.unstarted))):
            self.current[lane] = self.unstarted.pop(0)

    def slot_free(self, lane: int, slot: int) -> bool:
        free = self._free(lane, slot)
        self.refused |= not free
        return free

    def _free(self, lane: int, slot: int) -> bool:
        return all((p.lane, p.slot) != (lane, slot) for p in self.lands_at) and (
            self.frees_at.get((lane, slot), 0.0) <= self.now
        )

    def issue(self, pull: Pull) -> None:
        lane = pull.lane
        assert self._free(lane, pull.slot), "a busy slot was overwritten"
        assert pull.slot == sum(p.lane == lane for p in self.issued) % self.slots, "slots go round"
        assert len(self.queues.setdefault(lane, [])) < self.window, "the window was exceeded"
        assert pull.chunk == self.current[lane].pop(0), "a stream stays on its lane, in order"
        if not self.current[lane] and self.unstarted:
            self.current[lane] = self.unstarted.pop(0)
        self.lands_at[pull] = self.now + self.dice.uniform(0, self.slowest_pull_s)
        self.queues[lane].append(pull)
        self.issued.append(pull)
        self.refused = False
        self.most_inflight = max(self.most_inflight, len(self.lands_at))

    def landed(self, pull: Pull) -> bool:
        return self.lands_at[pull] <= self.now

    def drain(self, pull: Pull) -> None:
        assert self.lands_at.pop(pull) <= self.now, "drained before it landed"
        assert self.queues[pull.lane].pop(0) is pull, "drained out of order"
        self.frees_at[pull.lane, pull.slot] = self.now + self.dice.uniform(0, self.slowest_scatter_s)
        self.drained.append(pull)
        self.refused = False

    def wait(self, timeout_s: float | None) -> None:
        """A timed wait sees landings only (a GPU event tells nobody); an untimed one sees slots come free too."""
        self.waits.append(timeout_s)
        assert len(self.waits) < 100_000, "it does not end"
        assert timeout_s == (RECHECK_S if self.refused and self.lands_at else None)
        self._check_nothing_was_left_to_do()
        wakes = [t for t in self.lands_at.values() if t > self.now]
        if timeout_s is None:
            wakes += [t for t in self.frees_at.values() if t > self.now]
        else:
            wakes.append(self.now + timeout_s)
        assert wakes, "waits for nothing"
        if self.dice.random() < 0.9:  # else it woke up for no reason
            self.now = min(wakes)

    def _check_nothing_was_left_to_do(self) -> None:
        for lane, rest in self.current.items():
            queue = self.queues.get(lane, [])
            assert not queue or not self.landed(queue[0]), "a landed pull was left"
            turn = sum(p.lane == lane for p in self.issued) % self.slots
            idle = rest and len(queue) < self.window and self._free(lane, turn)
            assert not idle, "a pull could have been issued"


def simulate(world: World) -> None:
    count = run(world.streams, lanes=world.lanes, window=world.window, slots=world.slots, effects=world)
    chunks = [c for s in world.streams for c in s]
    assert count == len(chunks) == len(world.issued)
    assert sorted(p.chunk for p in world.issued) == sorted(chunks) == sorted(p.chunk for p in world.drained)
    assert not world.lands_at
    lane_of = {p.chunk: p.lane for p in world.issued}
    assert all(len({lane_of[c] for c in s}) == 1 for s in world.streams if s)
    assert len(set(lane_of.values())) == min(world.lanes, sum(map(bool, world.streams)))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    lengths = draw(st.lists(st.integers(0, 7), max_size=6))
    chunks = iter(draw(st.permutations(range(sum(lengths)))))
    window = draw(st.integers(1, 3))
    return World(
        streams=[sorted(next(chunks) for _ in range(n)) for n in lengths],
        lanes=draw(st.integers(1, 4)),
        window=window,
        slots=window + draw(st.integers(0, 2)),
        dice=random.Random(draw(st.integers(0, 10_000))),
        slowest_pull_s=draw(st.sampled_from((0.0, 0.001, 0.05))),
        slowest_scatter_s=draw(st.sampled_from((0.0, 0.001, 0.05))),
    )


@settings(max_examples=300)
@given(worlds())
def test_every_promise_holds_in_any_world(world: World) -> None:
    simulate(world)


@settings(max_examples=60)
@given(worlds())
def test_sync_0_is_serial(world: World) -> None:
    """One lane, one pull in flight: streams one after the other, never a timed wait."""
    world = World(world.streams, 1, 1, world.slots, world.dice, world.slowest_pull_s, world.slowest_scatter_s)
    simulate(world)
    assert [p.chunk for p in world.issued] == [c for s in world.streams for c in s]
    assert world.drained == world.issued
    assert world.most_inflight <= 1 and RECHECK_S not in world.waits


def test_nothing_to_pull() -> None:
    for streams in ([], [[]], [[], []]):
        world = World(streams, 2, 2, 2, random.Random(0))
        assert run(streams, lanes=2, window=2, slots=2, effects=world) == 0
        assert not world.waits


def test_every_lane_begins_with_a_stream_of_its_own() -> None:
    """A first stream that is shorter than the window does not make its lane take the second one as well."""
    world = World([[0], [1, 2, 3, 4]], lanes=2, window=2, slots=2, dice=random.Random(1))
    simulate(world)
    assert {p.lane for p in world.issued} == {0, 1}
    assert world.most_inflight == 3


def test_a_lane_takes_the_next_stream_right_after_its_last_issue() -> None:
    """With a window of 3 the second stream's first pulls are in flight beside the first stream's last."""
    world = World([[0, 1], [2, 3]], lanes=1, window=3, slots=3, dice=random.Random(1))
    simulate(world)
    assert world.most_inflight == 3


def test_a_blocked_lane_rechecks_while_others_pull_and_blocks_when_alone() -> None:
    """Slots that come back late while pulls are under way: 5 ms; nothing under way: no timeout."""
    busy = World([[0, 1, 2]], 1, 2, 2, random.Random(3), slowest_pull_s=0.02, slowest_scatter_s=0.5)
    simulate(busy)
    alone = World([[0, 1, 2]], 1, 1, 1, random.Random(3), slowest_pull_s=0.02, slowest_scatter_s=0.5)
    simulate(alone)
    assert RECHECK_S in busy.waits and RECHECK_S == 0.005
    assert set(alone.waits) == {None}


def test_an_error_of_an_effect_ends_the_run() -> None:
    class Broken(World):
        def drain(self, pull: Pull) -> None:
            raise RuntimeError("scatter failed")

    with pytest.raises(RuntimeError, match="scatter failed"):
        simulate(Broken([[0, 1]], 1, 1, 1, random.Random(0)))


def test_streams_of_a_column() -> None:
    assert streams_of([0, 0, 1, 0, 2, 1]) == [[0, 1, 3], [2, 5], [4]]
    assert streams_of([3, 1]) == [[1], [0]]
    assert streams_of([]) == []
