"""The state of a producer, pure: early is kept, old or repeated changes nothing, what is missing is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdtexec.plans import load_trainer
from rdtexec.serving import ServeState
from rdtplan.errors import TransferError
from rdtplan.ir.file import write_plan
from rdtplan.ir.topology import InferenceTopology
from tests.plans import Scenario, Sizes, make_plan


@pytest.fixture
def state(tmp_path: Path) -> ServeState:
    """One rank that owns everything, two workers."""
    scenario = Scenario(Sizes(layers=2, dense_layers=1), InferenceTopology(tensor_parallel=2))
    write_plan(make_plan(scenario), tmp_path / "p")
    return ServeState(load_trainer(tmp_path / "p", 0))


def serve_all(state: ServeState, sync: int, frees_of: tuple[int, ...]) -> None:
    """Publish every group as it may be, with the signals of some consumers."""
    while (group := state.next_group()) is not None:
        state.publish(group)
        for consumer in frees_of:
            state.free(consumer, sync, group)
        state.take_released()


def test_signals_and_completions_that_come_early_count(state: ServeState) -> None:
    """A consumer that pulls from other ranks alone may be complete before this one has begun."""
    for group in state.plan.producer.groups:
        state.free(1, 3, group)
    state.complete(1, 3)
    state.begin(3, [0, 1])
    serve_all(state, 3, (0,))
    assert not state.finished
    state.complete(0, 3)
    assert state.finished


def test_a_consumer_that_came_anew_has_sent_nothing_early(state: ServeState) -> None:
    """What an earlier connection of it sent does not count."""
    state.complete(1, 0)
    for group in state.plan.producer.groups:
        state.free(1, 0, group)
    state.forget(1)
    state.begin(0, [0, 1])
    serve_all(state, 0, (0,))
    assert not state.all_gathered
    assert "consumers [1] have not freed it" in state.waiting_for()


def test_old_signals_and_completions_do_not_count(state: ServeState) -> None:
    """Those of a sync that is over change nothing in the next."""
    state.begin(0, [0, 1])
    serve_all(state, 0, (0, 1))
    state.complete(0, 0)
    state.complete(1, 0)
    assert state.finished
    state.end()
    state.begin(1, [0, 1])
    for group in state.plan.producer.groups:
        state.free(0, 0, group)
        state.free(1, 0, group)
    state.complete(0, 0)
    state.complete(1, 0)
    serve_all(state, 1, ())
    assert not state.all_gathered and not state.finished


def test_a_chunk_is_served_once(state: ServeState) -> None:
    """A second pull is refused by name, also after the group was released."""
    state.begin(0, [0, 1])
    state.pull(0, 0, 0)
    serve_all(state, 0, (0, 1))
    assert [(s.consumers, s.chunk) for s in state.take_ready()] == [((0,), 0)]
    with pytest.raises(TransferError, match=r"RDT603.*consumer 0 asks producer 0 for chunk 0 a second time"):
        state.pull(0, 0, 0)


def test_a_failed_sync_leaves_nothing_to_the_next(state: ServeState) -> None:
    """Also when the number is used again; a run is told from another by its count."""
    state.begin(0, [0, 1])
    state.pull(0, 0, 0)
    first = state.run
    state.end()
    state.forget(0)
    state.begin(0, [0, 1])
    assert state.run != first
    serve_all(state, 0, (0, 1))
    assert state.take_ready() == []
    state.pull(0, 0, 0)
    assert [s.chunk for s in state.take_ready()] == [0]
