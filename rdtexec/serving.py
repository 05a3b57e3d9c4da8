"""What a producer owes whom: gathered groups, parked pulls, free signals, credits. Pure state, no waiting, no tensors.

Invariants:

- a pull is served once, when its group is published and, where replicas share a serve slot, when all live sharers
  asked;
- a group is released when every live consumer has freed it, and is never served after that;
- at most `gather_lookahead + 1` groups are published and unreleased, whatever the consumers do;
- pulls, signals and completions for a sync that has not begun are kept for it; those of an older sync are dropped;
- a sync is finished when every group is released and every live consumer has said that its model is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import define, frozen

from rdtexec.plans import TrainerPlan
from rdtplan.errors import TransferError


@frozen(slots=True)
class Serve:
    """Pack `chunk` of the program of `consumers` (sharers of one slot) and tell them."""

    consumers: tuple[int, ...]
    chunk: int
    seq: int


@define
class _Early:
    pulls: list[tuple[int, int]]
    frees: list[tuple[int, int]]
    completes: list[int]


def sharers(plan: TrainerPlan) -> dict[int, tuple[int, ...]]:
    """By consumer id: the consumers that execute the same chunks from the same producers, itself included."""
    alike: dict[tuple[int, int], list[int]] = {}
    for cid, consumer in sorted(plan.consumers.items()):
        alike.setdefault((id(consumer.program), id(consumer.routing)), []).append(cid)
    return {cid: tuple(members) for members in alike.values() for cid in members}


class ServeState:
    """The state of one producer over its syncs."""

    def __init__(self, plan: TrainerPlan) -> None:
        self.plan = plan
        self._groups = plan.producer.groups
        self._seq = {(s.consumer_id, c): i for s in plan.producer.servings for i, c in enumerate(s.chunks)}
        self._alike = sharers(plan)
        self._sharing: frozenset[int] = frozenset()
        self.sync = -1
        self.run = 0
        """Counts the syncs begun; a number may be used again after a failure."""
        self.running = False
        self._early: dict[int, _Early] = {}
        self._reset(())

    def _sharers(self, consumer: int) -> tuple[int, ...]:
        """Consumers that use the same serve slots as `consumer` in this sync, itself included."""
        if consumer not in self._sharing:
            return (consumer,)
        return tuple(c for c in self._alike[consumer] if c in self._sharing)

    def _reset(self, live: Sequence[int]) -> None:
        self._live = frozenset(live)
        self._gathered = 0
        self._published: set[int] = set()
        self._released: set[int] = set()
        self._freed: dict[int, set[int]] = {g: set() for g in self._groups}
        self._asked: dict[tuple[tuple[int, ...], int], set[int]] = {}
        self._ready: list[Serve] = []
        self._to_release: list[int] = []
        self._complete: set[int] = set()
        self._pulled: set[tuple[int, int]] = set()
        self.served = self.served_bytes = 0

    def begin(self, sync: int, live: Sequence[int], sharing: Collection[int] = ()) -> None:
        """Start a sync with the given live consumers; replays what arrived early for it.

        `sharing` are the consumers whose transport lets those that execute the same plan read one serve slot.
        """
        if self.running:
            raise TransferError(f"sync {sync} was begun while sync {self.sync} is running", code="RDT605")
        self.sync, self.running = sync, True
        self.run += 1
        self._sharing = frozenset(sharing).intersection(live)
        self._reset(live)
        early = self._early.pop(sync, _Early([], [], []))
        for stale in [s for s in self._early if s < sync]:
            del self._early[stale]
        for consumer, chunk in early.pulls:
            self.pull(consumer, sync, chunk)
        for consumer, group in early.frees:
            self.free(consumer, sync, group)
        for consumer in early.completes:
            self.complete(consumer, sync)

    def end(self) -> None:
        """The sync is over, well or not."""
        self.running = False

    def forget(self, consumer: int) -> None:
        """A consumer came anew: what an earlier connection of it sent early does not count."""
        for early in self._early.values():
            early.pulls = [p for p in early.pulls if p[0] != consumer]
            early.frees = [f for f in early.frees if f[0] != consumer]
            early.completes = [c for c in early.completes if c != consumer]

    def next_group(self) -> int | None:
        """The group to gather now, None while there is no credit or nothing is left."""
        if self._gathered == len(self._groups):
            return None
        if self._gathered - len(self._released) > self.plan.settings.gather_lookahead:
            return None
        return self._groups[self._gathered]

    @property
    def all_gathered(self) -> bool:
        return self._gathered == len(self._groups)

    @property
    def finished(self) -> bool:
        """Every group was gathered and released, and every live consumer has put its model together."""
        return len(self._released) == len(self._groups) and self._live <= self._complete

    def complete(self, consumer: int, sync: int) -> None:
        """A consumer has scattered and post-processed everything."""
        if self._is_early(sync):  # it pulls nothing from here, and all others have served it
            self._early.setdefault(sync, _Early([], [], [])).completes.append(consumer)
        elif sync == self.sync and self.running:
            self._complete.add(consumer)

    def publish(self, group: int) -> None:
        """`group` (the one `next_group` named) can be served from now on."""
        assert group == self._groups[self._gathered]
        self._gathered += 1
        self._published.add(group)
        for sharers, chunk in list(self._asked):
            self._try_serve(sharers, chunk)
        self._try_release(group)

    def pull(self, consumer: int, sync: int, chunk: int) -> None:
        """A consumer asks for a chunk. TransferError RDT603 when the plan gives it no such chunk from here."""
        if (consumer, chunk) not in self._seq:
            raise TransferError(
                f"consumer {consumer} asks producer {self.plan.producer.rank} for chunk {chunk}, "
                "which the plan does not give it",
                fix="both ends must run the same plan",
                code="RDT603",
            )
        if self._is_early(sync):
            self._early.setdefault(sync, _Early([], [], [])).pulls.append((consumer, chunk))
            return
        if sync != self.sync or not self.running or consumer not in self._live:
            return
        if (consumer, chunk) in self._pulled:
            raise TransferError(
                f"consumer {consumer} asks producer {self.plan.producer.rank} for chunk {chunk} a second time",
                code="RDT603",
            )
        self._pulled.add((consumer, chunk))
        sharers = self._sharers(consumer)
        self._asked.setdefault((sharers, chunk), set()).add(consumer)
        self._try_serve(sharers, chunk)

    def free(self, consumer: int, sync: int, group: int) -> None:
        """A consumer is done with a group; a repeated signal changes nothing."""
        if group not in self._freed:
            raise TransferError(
                f"consumer {consumer} frees group {group}, of which producer {self.plan.producer.rank} owns nothing",
                fix="both ends must run the same plan",
                code="RDT603",
            )
        if self._is_early(sync):
            self._early.setdefault(sync, _Early([], [], [])).frees.append((consumer, group))
            return
        if sync != self.sync or not self.running:
            return
        self._freed[group].add(consumer)
        self._try_release(group)

    def _is_early(self, sync: int) -> bool:
        return sync > self.sync or (sync == self.sync and not self.running and not self.finished)

    def take_ready(self) -> list[Serve]:
        """Serves that became possible since the last call."""
        if not self.running:
            return []
        found, self._ready = self._ready, []
        for serve in found:
            self.served += len(serve.consumers)
            nbytes = self.plan.consumers[serve.consumers[0]].program.chunks.nbytes[serve.chunk]
            self.served_bytes += nbytes * len(serve.consumers)
        return found

    def take_released(self) -> list[int]:
        """Groups that were freed by their last signal since the last call; the credit returns with this call.

        The caller gives their memory back before anybody can ask `next_group` again.
        """
        if not self.running:
            return []
        found, self._to_release = self._to_release, []
        self._released.update(found)
        return found

    @property
    def live(self) -> frozenset[int]:
        """Consumers that take part in this sync."""
        return self._live

    def _try_serve(self, sharers: tuple[int, ...], chunk: int) -> None:
        program = self.plan.consumers[sharers[0]].program
        if program.chunks.group[chunk] not in self._published:
            return
        wanted = self._live.intersection(sharers)
        asked = self._asked[sharers, chunk]
        if wanted <= asked:
            del self._asked[sharers, chunk]
            self._ready.append(Serve(tuple(sorted(asked)), chunk, self._seq[sharers[0], chunk]))

    def _try_release(self, group: int) -> None:
        done = group in self._released or group in self._to_release
        if group in self._published and not done and self._live <= self._freed[group]:
            self._to_release.append(group)

    def waiting_for(self) -> str:
        """What the sync waits for and by whom, in words."""
        labels = [g.label for g in self.plan.groups]
        held = [g for g in self._groups if g in self._published and g not in self._released]
        parts = [
            f"group {labels[g]} is held: consumers {sorted(self._live - self._freed[g])[:8]} have not freed it"
            for g in held[:3]
        ]
        parts += [
            f"chunk {chunk} waits for consumers {sorted(self._live.intersection(sharers) - asked)[:8]} to ask"
            for (sharers, chunk), asked in list(self._asked.items())[:2]
            if self.plan.consumers[sharers[0]].program.chunks.group[chunk] in self._published
        ]
        if not self.all_gathered:
            parts.append(f"{len(self._groups) - self._gathered} groups are still to be gathered")
        if not parts and not self._live <= self._complete:
            parts.append(f"consumers {sorted(self._live - self._complete)[:8]} have not said that they are complete")
        return "; ".join(parts) or "nothing"
