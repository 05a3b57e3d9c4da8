"""A sync on a virtual clock: the runtime's own scheduler and serving rules, and a model of the links between them.

The rules (which pull is issued when, what a producer may serve, when a group is freed) are the runtime's and come in
as `Rules`; here is only time. The model: every producer and every consumer has one link of `bandwidth`; transfers under
way share links max-min fairly; a control message takes `latency`; gathering the largest group takes `gather_s`, others
in proportion, and a group that several ranks own is gathered by all of them together; scatters run at
`scatter_bandwidth`, one at a time.

Each consumer's scheduler is ordinary blocking code, so it runs in a thread of its own; exactly one thread runs at any
time, handed on by semaphores, so a simulation is deterministic. Time is counted in whole nanoseconds.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

from attrs import define, field, frozen

from rdtplan.errors import PlanError
from rdtplan.ir.manifest import Ints
from rdtplan.ir.plan import ConsumerPlan
from rdtplan.ir.view import PlanView

NS = 1_000_000_000
SYNC = 1
"""A sync after the first: lanes and windows are in use."""


@frozen(slots=True)
class Costs:
    """What the plan does not know. Bytes a second and seconds."""

    bandwidth: float
    latency_s: float = 20e-6
    gather_s: float = 0.0
    """Gathering the largest group."""
    scatter_bandwidth: float = math.inf
    first_sync: bool = False
    """Sync 0 runs one pull at a time."""


@frozen(slots=True)
class Rules:
    """The runtime's decisions, injected by the caller."""

    run: Callable[..., int]
    """The lane scheduler, `rdtexec.schedule.run`."""
    serve_state: Callable[[PlanView, int, dict[int, ConsumerPlan]], Any]
    """(plan, trainer rank, consumers) -> `rdtexec.serving.ServeState` of that rank."""
    needs_slots: bool
    frees_on_landing: bool


@frozen(slots=True)
class PullTimes:
    """One pull, seconds since the sync began."""

    consumer: int
    chunk: int
    lane: int
    producer: int
    stream: int
    group: int
    nbytes: int
    issued: float
    ready: float
    landed: float
    scattered: float


@frozen(slots=True)
class GroupTimes:
    """One gather group on one producer, seconds since the sync began."""

    producer: int
    group: int
    started: float
    published: float
    released: float


@frozen(slots=True)
class Simulation:
    """What a sync did on the virtual clock."""

    costs: Costs
    seconds: float
    floor_s: float
    """The busiest link's bytes over its bandwidth: no schedule is faster."""
    pulls: tuple[PullTimes, ...]
    groups: tuple[GroupTimes, ...]
    bottleneck: str
    """In words."""
    shares: dict[str, float]
    """What pulls waited for, parts of 1: publish, messages, transfer."""
    workers: int
    labels: tuple[str, ...]
    """Of the gather groups."""

    @property
    def of_floor(self) -> float:
        """Times the floor; 1 is perfect."""
        return self.seconds / self.floor_s if self.floor_s else 1.0


def simulate(plan: PlanView, costs: Costs, rules: Rules) -> Simulation:
    """Run one sync of a sound plan. PlanError RDT330 when it comes to a standstill."""
    world = _World(plan, costs, rules)
    world.run()
    pulls = tuple(sorted(world.pulls, key=lambda p: (p.landed, p.consumer, p.chunk)))
    groups = tuple(sorted(world.group_times(), key=lambda g: (g.producer, g.started)))
    seconds = world.now / NS
    floor_s = _floor(pulls, costs)
    shares = _shares(pulls, groups, costs)
    named = _bottleneck(pulls, groups, costs, seconds, shares)
    labels = tuple(g.label for g in world.groups)
    return Simulation(costs, seconds, floor_s, pulls, groups, named, shares, len(world.consumers), labels)


class Switch(Protocol):
    """How a consumer's thread gives the turn back."""

    def __call__(self) -> None: ...


@define(eq=False)
class _Flow:
    pull: Any
    consumer: int
    producer: int
    left: float
    rate: float = 0.0


class _World:
    """The event loop. Everything below runs in one thread at a time."""

    def __init__(self, plan: PlanView, costs: Costs, rules: Rules) -> None:
        self.plan, self.costs, self.rules = plan, costs, rules
        self.now = 0
        self.latency = round(costs.latency_s * NS)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = count()
        topology = plan.field("topology")
        self.groups = plan.field("groups")
        self.settings = plan.field("settings")
        ownership = plan.field("ownership")
        self.owners = _owners_of_groups(ownership.classes, ownership.class_of, self.groups)
        plans = {c: plan.consumer(c) for c in range(topology.workers)}
        self.consumers = [_Consumer(self, p) for p in plans.values()]
        self.producers = [_Producer(self, plan.producer(r).rank, plans) for r in range(ownership.ranks)]
        self.flows: list[_Flow] = []
        self._flows_changed = False
        self._advanced = 0
        self._generation = 0
        self._arrived: dict[int, set[int]] = {}
        self.pulls: list[PullTimes] = []

    # -- time ------------------------------------------------------------------------------------------------------

    def after(self, delay: int, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), what))

    def run(self) -> None:
        try:
            for p in self.producers:
                p.begin()
            for c in self.consumers:
                c.start()
            self._settle()
            while self._events:
                self.now = self._events[0][0]
                while self._events and self._events[0][0] == self.now:
                    heapq.heappop(self._events)[2]()
                self._settle()
            if not (all(c.done for c in self.consumers) and all(p.state.finished for p in self.producers)):
                raise PlanError(self._standstill(), fix="report a bug with this plan", code="RDT330")
        finally:
            for c in self.consumers:
                c.abandon()

    def _settle(self) -> None:
        """Let everybody act who can at this moment, then share the links anew."""
        moved = True
        while moved:
            stepped = [actor.step() for actor in (*self.producers, *self.consumers)]
            moved = any(stepped)
            while self._events and self._events[0][0] == self.now:
                heapq.heappop(self._events)[2]()
                moved = True
        if self._flows_changed:
            self._share_links()

    def _standstill(self) -> str:
        waiting = [f"producer {p.rank}: {p.state.waiting_for()}" for p in self.producers if not p.state.finished]
        return f"the sync comes to a standstill after {self.now / NS:.3f} s; {'; '.join(waiting[:3])}"

    # -- links -----------------------------------------------------------------------------------------------------

    def transfer(self, pull: Any, consumer: int, producer: int, nbytes: int) -> None:
        self._advance()
        self.flows.append(_Flow(pull, consumer, producer, float(nbytes)))
        self._flows_changed = True

    def _advance(self) -> None:
        passed = self.now - self._advanced
        if passed:
            for flow in self.flows:
                flow.left -= flow.rate * passed
        self._advanced = self.now

    def _share_links(self) -> None:
        """Max-min fair rates, bytes a nanosecond; then an event when the first flow ends."""
        self._advance()
        self._flows_changed = False
        self._generation += 1
        if not self.flows:
            return
        _fill(self.flows, self.costs.bandwidth / NS)
        delay = min(math.ceil(max(f.left, 0.0) / f.rate) for f in self.flows)
        generation = self._generation
        self.after(max(delay, 0), lambda: self._land(generation))

    def _land(self, generation: int) -> None:
        if generation != self._generation:
            return
        self._advance()
        landed = [f for f in self.flows if f.left <= f.rate]
        self.flows = [f for f in self.flows if f.left > f.rate]
        self._flows_changed = True
        for f in landed:
            self.consumers[f.consumer].on_landed(f.pull)

    # -- gathering -------------------------------------------------------------------------------------------------

    def arrive(self, rank: int, group: int) -> None:
        """A rank is ready to gather a group; it begins when all its owners are."""
        here = self._arrived.setdefault(group, set())
        here.add(rank)
        if here == set(self.owners[group]):
            largest = max(g.nbytes for g in self.groups) or 1
            delay = round(self.costs.gather_s * NS * self.groups[group].nbytes / largest)
            for r in here:
                self.producers[r].gather(group, delay)

    def group_times(self) -> list[GroupTimes]:
        return [
            GroupTimes(p.rank, g, p.started[g] / NS, p.published[g] / NS, p.released[g] / NS)
            for p in self.producers
            for g in p.published
        ]


def _owners_of_groups(classes: tuple[Ints, ...], class_of: Ints, groups: Sequence[Any]) -> list[Ints]:
    found = []
    for g in groups:
        present = set(class_of[g.first : g.first + g.count])
        found.append(tuple(sorted({r for c in present for r in classes[c]})))
    return found


def _fill(flows: list[_Flow], capacity: float) -> None:
    """Max-min fair rates over links of one capacity at both ends: the tightest links share first."""
    links: dict[tuple[str, int], list[_Flow]] = {}
    for f in flows:
        links.setdefault(("p", f.producer), []).append(f)
        links.setdefault(("c", f.consumer), []).append(f)
    left = dict.fromkeys(links, capacity)
    open_flows = {link: len(members) for link, members in links.items()}
    rated: set[int] = set()
    while len(rated) < len(flows):
        share = min(left[link] / n for link, n in open_flows.items() if n)
        tight = [link for link, n in open_flows.items() if n and left[link] / n <= share * (1 + 1e-9)]
        for link in tight:
            for f in links[link]:
                if id(f) in rated:
                    continue
                rated.add(id(f))
                f.rate = share
                for end in (("p", f.producer), ("c", f.consumer)):
                    open_flows[end] -= 1
                    left[end] -= share


class _Consumer:
    """One worker: the effects that the scheduler runs on, in a thread that runs only when it has the turn."""

    def __init__(self, world: _World, plan: ConsumerPlan) -> None:
        self._w, self._plan = world, plan
        self.id = plan.consumer_id
        self.done = False
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._wake = True
        self._waiting_for_slot = False
        self._abandoned = False
        self._error: BaseException | None = None
        self._issued: dict[int, int] = {}
        self._ready: dict[int, int] = {}
        self._landed: set[Any] = set()
        self._landed_at: dict[int, int] = {}
        self._busy: set[tuple[int, int]] = set()
        self._scatter_free = 0
        self._in_flight: dict[int, Any] = {}
        self._unscattered = len(plan.program.chunks)
        self._thread = threading.Thread(target=self._main, daemon=True)

    # -- the turn --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def step(self) -> bool:
        """Run until the scheduler waits again; False when it has nothing to do."""
        if not self._wake or self.done:
            return False
        self._wake = False
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error
        return True

    def abandon(self) -> None:
        """End the thread of a simulation that failed."""
        if self._thread.is_alive():
            self._abandoned = True
            self._turn.release()
            self._thread.join(5)

    def _main(self) -> None:
        self._turn.acquire()
        try:
            if not self._abandoned:
                self._sync()
        except _Abandoned:
            pass
        except BaseException as error:  # carried to the thread that waits for this one
            self._error = error
        self.done = True
        self._back.release()

    def _sync(self) -> None:
        if not self._unscattered:
            self._complete()
        program, settings = self._plan.program, self._w.settings
        for group, after in enumerate(program.free_after):
            if after == -1:
                self._free(group)
        streams: dict[int, list[int]] = {}
        for chunk, stream in enumerate(program.chunks.stream):
            streams.setdefault(stream, []).append(chunk)
        serial, k = self._w.costs.first_sync, settings.num_rdt_buffers
        self._w.rules.run(
            [streams[s] for s in sorted(streams)],
            lanes=1 if serial else max(1, min(settings.stages_in_flight, len(streams))),
            window=1 if serial else k,
            slots=k,
            effects=self,
        )

    # -- effects ---------------------------------------------------------------------------------------------------

    def slot_free(self, lane: int, slot: int) -> bool:
        return not self._w.rules.needs_slots or (lane, slot) not in self._busy

    def issue(self, pull: Any) -> None:
        chunk = pull.chunk
        self._issued[chunk] = self._w.now
        self._in_flight[chunk] = pull
        self._busy.add((pull.lane, pull.slot))
        producer = self._w.producers[self._plan.routing.producer[chunk]]
        self._w.after(self._w.latency, lambda: producer.state.pull(self.id, SYNC, chunk))

    def landed(self, pull: Any) -> bool:
        return pull in self._landed

    def drain(self, pull: Any) -> None:
        w, chunk = self._w, pull.chunk
        self._landed.discard(pull)
        nbytes = self._plan.program.chunks.nbytes[chunk]
        start = max(w.now, self._scatter_free)
        self._scatter_free = start + round(nbytes / w.costs.scatter_bandwidth * NS)
        if self._scatter_free > w.now:
            w.after(self._scatter_free - w.now, lambda: self._scattered(pull))
        else:
            self._scattered(pull)
        if w.rules.frees_on_landing:
            self._free_after(chunk)

    def wait(self, timeout_s: float | None) -> None:
        """Give the turn back until a pull landed, or the timeout, or, with nothing in flight, until a slot is free."""
        self._waiting_for_slot = timeout_s is None and not self._in_flight
        if timeout_s is not None:
            self._w.after(round(timeout_s * NS), self._rouse)
        self._back.release()
        self._turn.acquire()
        if self._abandoned:
            raise _Abandoned

    # -- what happens to it ----------------------------------------------------------------------------------------

    def _rouse(self) -> None:
        self._wake = True

    def on_ready(self, chunk: int) -> None:
        self._ready[chunk] = self._w.now
        routing = self._plan.routing
        self._w.transfer(
            self._in_flight[chunk], self.id, routing.producer[chunk], self._plan.program.chunks.nbytes[chunk]
        )

    def on_landed(self, pull: Any) -> None:
        self._landed.add(pull)
        self._landed_at[pull.chunk] = self._w.now
        self._in_flight.pop(pull.chunk)
        self._wake = True

    def _scattered(self, pull: Any) -> None:
        chunk, chunks = pull.chunk, self._plan.program.chunks
        self._busy.discard((pull.lane, pull.slot))
        if not self._w.rules.frees_on_landing:
            self._free_after(chunk)
        if self._waiting_for_slot:
            self._wake = True
        times = (self._issued[chunk], self._ready[chunk], self._landed_at[chunk], self._w.now)
        self._w.pulls.append(
            PullTimes(
                self.id,
                chunk,
                pull.lane,
                self._plan.routing.producer[chunk],
                chunks.stream[chunk],
                chunks.group[chunk],
                chunks.nbytes[chunk],
                *(t / NS for t in times),
            )
        )

        self._unscattered -= 1
        if not self._unscattered:
            self._complete()

    def _complete(self) -> None:
        """Tell every producer, as the runtime does, that the model is complete."""
        for producer in self._w.producers:
            self._w.after(self._w.latency, lambda s=producer.state: s.complete(self.id, SYNC))  # type: ignore[misc]

    def _free_after(self, chunk: int) -> None:
        group = self._plan.program.chunks.group[chunk]
        if self._plan.program.free_after[group] == chunk:
            self._free(group)

    def _free(self, group: int) -> None:
        for rank in self._w.owners[group]:
            state = self._w.producers[rank].state
            self._w.after(self._w.latency, lambda s=state: s.free(self.id, SYNC, group))  # type: ignore[misc]


class _Abandoned(Exception):
    """The simulation failed elsewhere; this thread ends."""


@define(eq=False)
class _Producer:
    """One trainer rank: the runtime's serving state, and when its groups are gathered."""

    _w: _World
    rank: int
    _plans: dict[int, ConsumerPlan]
    state: Any = field(init=False)
    started: dict[int, int] = field(factory=dict, init=False)
    published: dict[int, int] = field(factory=dict, init=False)
    released: dict[int, int] = field(factory=dict, init=False)
    _claimed: int | None = field(default=None, init=False)

    def begin(self) -> None:
        self.state = self._w.rules.serve_state(self._w.plan, self.rank, self._plans)
        sharing = self._plans if self._w.rules.needs_slots else ()  # one packed slot for all with the same plan
        self.state.begin(SYNC, tuple(self._plans), sharing)

    def step(self) -> bool:
        """Serve, release and begin to gather whatever is possible now."""
        served, released = self.state.take_ready(), self.state.take_released()
        for serve in served:
            for cid in serve.consumers:
                consumer = self._w.consumers[cid]
                self._w.after(self._w.latency, lambda c=consumer, k=serve.chunk: c.on_ready(k))  # type: ignore[misc]
        for group in released:
            self.released[group] = self._w.now
        group = self.state.next_group()
        if group is not None and group != self._claimed:
            self._claimed = group
            self._w.arrive(self.rank, group)
            return True
        return bool(served or released)

    def gather(self, group: int, delay: int) -> None:
        self.started[group] = self._w.now
        self._w.after(delay, lambda: self._publish(group))

    def _publish(self, group: int) -> None:
        self.published[group] = self._w.now
        self.state.publish(group)


# -- what it means -------------------------------------------------------------------------------------------------


def link_loads(pulls: Sequence[PullTimes], end: str) -> dict[int, list[PullTimes]]:
    """Pulls by the link they used; `end` is `producer` or `consumer`."""
    found: dict[int, list[PullTimes]] = {}
    for p in pulls:
        found.setdefault(getattr(p, end), []).append(p)
    return dict(sorted(found.items()))


def _floor(pulls: Sequence[PullTimes], costs: Costs) -> float:
    loads = [
        sum(p.nbytes for p in mine) for end in ("producer", "consumer") for mine in link_loads(pulls, end).values()
    ]
    return max(loads, default=0) / costs.bandwidth


def _shares(pulls: Sequence[PullTimes], groups: Sequence[GroupTimes], costs: Costs) -> dict[str, float]:
    published = {(g.producer, g.group): g.published for g in groups}
    publish = messages = transfer = 0.0
    for p in pulls:
        there = p.issued + costs.latency_s
        publish += max(0.0, published[p.producer, p.group] - there)
        messages += 2 * costs.latency_s
        transfer += p.landed - p.ready
    total = publish + messages + transfer or 1.0
    return {"publish": publish / total, "messages": messages / total, "transfer": transfer / total}


BUSY = 0.85
"""A link or gather that works this part of the time is the bottleneck."""


def _bottleneck(
    pulls: Sequence[PullTimes], groups: Sequence[GroupTimes], costs: Costs, seconds: float, shares: dict[str, float]
) -> str:
    """The resource that is busy nearly all the time; else what pulls waited for most."""
    if not pulls or not seconds:
        return "nothing is moved"
    busiest: list[tuple[float, str]] = []
    for end, name in (("producer", "link of trainer rank"), ("consumer", "link of worker")):
        for number, mine in link_loads(pulls, end).items():
            nbytes = sum(p.nbytes for p in mine)
            busiest.append((nbytes / costs.bandwidth / seconds, f"the {name} {number}"))
    gathering: dict[int, float] = {}
    for g in groups:
        gathering[g.producer] = gathering.get(g.producer, 0.0) + g.published - g.started
    busiest += [(s / seconds, f"the gather of trainer rank {r}") for r, s in gathering.items()]
    share, name = max(busiest, key=lambda b: b[0])
    if share >= BUSY:
        return f"{name}, busy {100 * share:.0f}% of the time"
    waited = max(shares, key=lambda k: shares[k])
    rest = f"no link is busy more than {100 * share:.0f}% of the time"
    if waited == "messages":
        return f"message latency: raise num_rdt_buffers or chunk sizes ({rest})"
    if waited == "transfer":
        return f"links shared unevenly: pulls meet at one link while others idle ({rest})"
    gather = max(gathering.values(), default=0.0) / seconds
    link = max(b[0] for b in busiest if "link" in b[1])
    if gather + link >= BUSY and gather >= 1 - BUSY:
        return f"gather and transfer take turns: raise gather_lookahead ({rest})"
    return f"the free barrier: producers hold lookahead + 1 groups and wait for the slowest worker ({rest})"
