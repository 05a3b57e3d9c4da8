"""What a worker or a trainer rank loads of a plan, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve, frozen
from forgery import with_digests, with_program
from plans import Scenario, make_plan
from test_plan_file import SHARED_FAULTS, WORKER_FAULTS, Change, nested, producer, put

from rdtexec.plans import check_live_manifest, chunk_keys, chunk_scatters, load_trainer, load_worker
from rdtplan.errors import PlanError, PlanMismatch, RdtError
from rdtplan.ir.file import write_plan
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import InferenceTopology, Position, TransferSettings

SCENARIO = Scenario(
    topology=InferenceTopology(tensor_parallel=2, replicas=2),
    settings=TransferSettings(max_chunk_bytes=256, stages_in_flight=2),
    trainer_ranks=4,
    ownership="pipeline",
    seed=1,
)


@pytest.fixture(scope="module")
def plan() -> FleetPlan:
    return make_plan(SCENARIO)


def written(plan: FleetPlan, folder: Path) -> Path:
    write_plan(plan, folder / "fleet.plan")
    return folder / "fleet.plan"


def test_a_worker_gets_its_own(tmp_path: Path, plan: FleetPlan) -> None:
    path = written(plan, tmp_path)
    for consumer in plan.consumers:
        worker = load_worker(path, consumer.consumer_id, position=consumer.position, replica=consumer.replica)
        assert worker.consumer == consumer and worker.manifest == plan.manifest
        assert worker.slot_nbytes == plan.memory.receive_slot_nbytes
        for owners, group in zip(worker.owners_of_group, plan.groups, strict=True):
            members = range(group.first, group.first + group.count)
            assert owners == tuple(sorted({r for k in members for r in plan.ownership.owners(k)}))
        program = consumer.program
        n = len(program.chunks)
        assert [k for c in range(n) for k in chunk_keys(program, c)] == list(range(len(program.keys)))
        assert [s for c in range(n) for s in chunk_scatters(program, c)] == list(range(len(program.scatters)))
        assert worker.chunk_label(0).startswith("chunk 0 (group model.embed_tokens.weight, ")


def test_a_trainer_rank_gets_its_own(tmp_path: Path, plan: FleetPlan) -> None:
    path = written(plan, tmp_path)
    for rank in range(SCENARIO.trainer_ranks):
        trainer = load_trainer(path, rank)
        assert trainer.producer == plan.producers[rank]
        assert trainer.consumer_ids == (0, 1, 2, 3)
        assert set(trainer.consumers) == {s.consumer_id for s in trainer.producer.servings}
        own = [k for g in range(len(plan.groups)) for k in trainer.own_names(g)]
        assert own == [k for k in range(len(plan.manifest)) if rank in plan.ownership.owners(k)]


def test_another_place_is_refused(tmp_path: Path, plan: FleetPlan) -> None:
    path = written(plan, tmp_path)
    with pytest.raises(PlanMismatch, match="position DP0 PP0 TP1, this worker has DP0 PP0 TP0") as caught:
        load_worker(path, 1, position=Position(0, 0, 0))
    assert caught.value.code == "RDT502"
    with pytest.raises(PlanMismatch, match="replica 0, this worker has 1"):
        load_worker(path, 1, replica=1)


@pytest.mark.parametrize("fault", [*WORKER_FAULTS, *SHARED_FAULTS], ids=lambda f: f[2])
def test_neither_loads_what_is_impossible(tmp_path: Path, plan: FleetPlan, fault: tuple[Change, str, str]) -> None:
    """The worker names the fault; the trainer refuses too, or loads what concerns it not, and never stumbles."""
    change, code, _ = fault
    path = written(with_digests(change(plan)), tmp_path)
    with pytest.raises(PlanError) as caught:
        load_worker(path, 0)
    assert not code or caught.value.code == code
    for rank in range(SCENARIO.trainer_ranks):
        try:
            load_trainer(path, rank)
        except RdtError as error:
            assert error.code.startswith("RDT3")


@pytest.mark.parametrize(
    "change",
    [
        producer(groups=lambda g: g[1:]),
        producer(groups=(10**9,)),
        producer(signals=lambda s: put(s, 0, 3)),
        producer(group_nbytes=lambda s: put(s, 0, 3)),
        producer(servings=lambda s: put(s, 0, lambda x: evolve(x, slot_nbytes=16))),
        producer(servings=lambda s: put(s, 0, lambda x: evolve(x, chunks=x.chunks[::-1]))),
        producer(servings=lambda s: s + s[:1]),
    ],
)
def test_a_trainer_rank_refuses_what_is_impossible(
    tmp_path: Path, plan: FleetPlan, change: Callable[[FleetPlan], FleetPlan]
) -> None:
    path = written(change(plan), tmp_path)
    with pytest.raises(PlanError) as caught:
        load_trainer(path, 0)
    assert caught.value.code == "RDT330" and "producers[0]." in caught.value.message
    assert load_trainer(path, 1).producer == plan.producers[1]


def test_a_slot_that_holds_no_chunk_is_refused(tmp_path: Path, plan: FleetPlan) -> None:
    """Pulling into it would write beyond its end."""
    path = written(nested("memory", receive_slot_nbytes=64)(plan), tmp_path)
    with pytest.raises(PlanError, match="receive_slot_nbytes: 64 is less than a chunk of"):
        load_worker(path, 0)


@frozen
class Row:
    name: str
    dtype: str
    shape: tuple[int, ...]


class Source:
    """A live trainer that declares what it is told to."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def metadata(self) -> list[Row]:
        return self.rows


def test_a_live_trainer_must_declare_what_was_planned(tmp_path: Path, plan: FleetPlan) -> None:
    trainer = load_trainer(written(plan, tmp_path), 0)
    m = plan.manifest
    rows = [Row(n, m.dtype(k), m.shape(k)) for k, n in enumerate(m.names)]
    check_live_manifest(trainer, Source(rows))
    check_live_manifest(trainer, Source(rows[::-1]))
    for wrong, words in (
        (rows[1:], "'model.embed_tokens.weight': plan bfloat16 .* the trainer does not have it"),
        ([evolve(rows[0], dtype="float32"), *rows[1:]], "plan bfloat16 .* trainer float32"),
        ([evolve(rows[0], shape=(1, 2)), *rows[1:]], r"plan bfloat16 \(11, 8\), trainer bfloat16 \(1, 2\)"),
        ([*rows, Row("x", "bfloat16", ()), Row("y", "bfloat16", ())], "declares 'x' and 1 more names"),
    ):
        with pytest.raises(PlanMismatch, match=words) as caught:
            check_live_manifest(trainer, Source(wrong))
        assert caught.value.code == "RDT503"


def test_a_forged_program_of_another_worker_is_the_trainers_affair_when_it_serves_it(
    tmp_path: Path, plan: FleetPlan
) -> None:
    """Worker 1 runs another program than worker 0: its own load is untouched, its producers refuse."""
    forged = with_digests(with_program(plan, keys=lambda k: evolve(k, offset=put(k.offset, 1, 8))))
    path = written(forged, tmp_path)
    assert load_worker(path, 1).consumer == plan.consumers[1]
    with pytest.raises(PlanError, match=r"keys\.offset"):
        load_trainer(path, forged.consumers[0].routing.producer[1])
