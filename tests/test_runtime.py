"""Transports and state machines between real processes: every byte on every transport, and every failure named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rdtexec.consumer import Consumer
from rdtexec.destination import Destination
from rdtexec.plans import load_trainer, load_worker
from rdtexec.pool import PoolGeometry, ReceivePool
from rdtplan.errors import PlanFormatError, PlanMismatch, RdtError, TransferError
from rdtplan.ir.file import write_plan
from rdtplan.ir.topology import InferenceTopology, Position, TransferSettings
from tests.fleet import Faults, destination_model, running
from tests.plans import Scenario, Sizes, make_plan

TRANSPORTS = ("local", "nixl")
LAYERS = Sizes(layers=4, dense_layers=1)
SCENARIOS = {
    "fsdp, TP2": Scenario(LAYERS, InferenceTopology(tensor_parallel=2), trainer_ranks=2),
    "two stages, two streams, TP2 EP": Scenario(
        LAYERS,
        InferenceTopology(tensor_parallel=2, expert_parallel=True),
        TransferSettings(stages_in_flight=2),
        trainer_ranks=2,
        ownership="pipeline",
        seed=1,
    ),
    "experts, PP2, no lookahead, one slot, small chunks": Scenario(
        LAYERS,
        InferenceTopology(pipeline_parallel=2),
        TransferSettings(num_rdt_buffers=1, gather_lookahead=0, max_chunk_bytes=256),
        trainer_ranks=3,
        ownership="experts",
        shuffled=True,
    ),
    "mixed, three slots, replicas": Scenario(
        LAYERS,
        InferenceTopology(tensor_parallel=2, replicas=2),
        TransferSettings(num_rdt_buffers=3, stages_in_flight=3, gather_lookahead=2, max_chunk_bytes=1000),
        trainer_ranks=4,
        ownership="pipeline+experts",
        seed=2,
    ),
}
PAIR = SCENARIOS["two stages, two streams, TP2 EP"]
COUPLED = SCENARIOS["fsdp, TP2"]
"""Every rank owns everything, so nobody can finish a sync without the others."""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_parameter_is_byte_exact_after_every_sync(name: str, transport: str, tmp_path: Path) -> None:
    """Five syncs with changing random bytes; every worker holds what stock loaders would have left."""
    with running(SCENARIOS[name], tmp_path, transport) as fleet:
        for sync in range(5):
            reports = fleet.sync(sync)
            assert fleet.wrong(sync) == {}
            for cid, child in enumerate(fleet.workers):
                assert reports[child.name].pulls == len(fleet.plan.consumers[cid].program.chunks)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_group_lives_beside_the_next_gather(transport: str, tmp_path: Path) -> None:
    """With `gather_lookahead` 0 a trainer has one group in memory, whatever the transport keeps until it is freed."""
    scenario = Scenario(Sizes(layers=3), settings=TransferSettings(gather_lookahead=0))
    with running(scenario, tmp_path, transport) as fleet:
        fleet.sync(0)
        fleet.sync(1)
        assert fleet.ask(fleet.producers, "most alive") == [0]


def test_auto_chooses_by_pair(tmp_path: Path) -> None:
    """Local for the worker on this node, nixl for one that says it is on another; both exact, alone and together."""
    with running(COUPLED, tmp_path, "auto", far=("worker 1",)) as fleet:
        assert fleet.ask(fleet.workers, "transports") == [{0: "local"}, {1: "nixl"}]
        for sync, live in enumerate((None, None, [1], [0], None)):
            fleet.sync(sync, live)
            assert fleet.wrong(sync, live) == {}


def test_a_group_that_comes_over_two_transports_is_freed_after_the_copy(tmp_path: Path) -> None:
    """Its last chunk has landed in a slot while an earlier one is still to be copied from its trainer's memory."""
    scenario = Scenario(LAYERS, settings=TransferSettings(gather_lookahead=0), trainer_ranks=3, ownership="experts")
    with running(scenario, tmp_path, "auto", far=("producer 2",)) as fleet:
        (chosen,) = fleet.ask(fleet.workers, "transports")
        assert chosen[0] == chosen[1] == "local" and chosen[2] == "nixl"
        fleet.ask(fleet.workers, "slow copies", 0.05)
        for sync in range(3):
            fleet.sync(sync)
            assert fleet.wrong(sync) == {}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stale_destination_would_be_noticed(transport: str, tmp_path: Path) -> None:
    """The comparison can fail: after sync 1 the parameters differ from sync 0's."""
    with running(PAIR, tmp_path, transport) as fleet:
        fleet.sync(0)
        fleet.sync(1)
        assert len(fleet.wrong(0)) == len(fleet.workers)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("raise", "the trainer's gather broke"),
        ("shape", "as bfloat16 (1, 11, 8), the plan has bfloat16 (11, 8)"),
        ("dtype", "as int16 (11, 8), the plan has bfloat16 (11, 8)"),
        ("order", "the source yields 'model.layers.0.self_attn.q_proj.bias' where the plan has"),
        ("short", "the source ended before 'model.embed_tokens.weight'"),
        ("extra", "the source yields 'model.surprise.weight', which was not asked for"),
        ("nothing", "claims 'model.embed_tokens.weight' and yields nothing"),
    ],
)
def test_a_wrong_source_fails_the_sync_everywhere(kind: str, words: str, transport: str, tmp_path: Path) -> None:
    """Producer and consumers end at once with one error that names the weight; no success is reported."""
    with running(PAIR, tmp_path, transport, faults=Faults(kind, rank=0, sync=1)) as fleet:
        fleet.sync(0)
        fleet.begin(1)
        status, text = fleet.answer(fleet.producers[0], 60)
        assert status == "error" and words in text
        for child in fleet.workers:
            status, text = fleet.answer(child, 60)
            assert status == "error" and "producer 0" in text and words in text, text
        status, text = fleet.answer(fleet.producers[1], 60)
        assert status == "error" and words in text
        fleet.ask(fleet.producers, "mend")
        fleet.connect()
        fleet.sync(2)
        assert fleet.wrong(2) == {}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failed_consumer_refuses_to_go_on(transport: str, tmp_path: Path) -> None:
    """After a failed sync the model is partly overwritten, and the consumer says so instead of syncing again."""
    with running(PAIR, tmp_path, transport, faults=Faults("raise", rank=0, sync=1)) as fleet:
        fleet.sync(0)
        with pytest.raises(TransferError):
            fleet.sync(1)
        for child in fleet.workers:
            child.tell("sync", 2)
            status, text = fleet.answer(child, 60)
            assert status == "error" and "sync 1 failed" in text and "partly overwritten" in text


def test_a_plan_for_another_position_is_refused(tmp_path: Path) -> None:
    """A worker that knows where it stands does not run another rank's part."""
    write_plan(make_plan(PAIR), tmp_path / "p")
    load_worker(tmp_path / "p", 1, position=Position(0, 0, 1))
    with pytest.raises(PlanMismatch, match=r"RDT502.*position DP0 PP0 TP1, this worker has DP0 PP0 TP0"):
        load_worker(tmp_path / "p", 1, position=Position(0, 0, 0))
    with pytest.raises(PlanFormatError, match=r"RDT406.*there is no consumer 2"):
        load_worker(tmp_path / "p", 2)
    with pytest.raises(PlanFormatError, match=r"RDT406.*there is no producer 7"):
        load_trainer(tmp_path / "p", 7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("dtype", "'model.norm.weight': dtype: plan bfloat16, model float16"),
        ("shape", r"'model.norm.weight': shape: plan \[8\], model \[9\]"),
        ("missing", "'model.norm.weight': the plan writes it, the model does not have it"),
        ("extra", "'model.extra.weight': the plan does not know it"),
    ],
)
def test_a_plan_for_another_model_is_refused(change: str, words: str, tmp_path: Path) -> None:
    """The first differing field of the geometry is named with both values."""
    write_plan(make_plan(Scenario()), tmp_path / "p")
    program = load_worker(tmp_path / "p", 0).consumer.program
    model = destination_model(program.parameters)
    Destination(model, program)
    norm = model.get_submodule("model.norm")
    if change == "dtype":
        norm.weight = torch.nn.Parameter(norm.weight.half(), requires_grad=False)
    elif change == "shape":
        norm.weight = torch.nn.Parameter(torch.zeros(9, dtype=torch.bfloat16), requires_grad=False)
    elif change == "missing":
        del norm.weight
    else:
        extra = torch.nn.Module()
        extra.weight = torch.nn.Parameter(torch.zeros(1))
        model.get_submodule("model").add_module("extra", extra)
    with pytest.raises(PlanMismatch, match="RDT501.*" + words):
        Destination(model, program)


def test_producers_refuse_a_consumer_with_another_plan(tmp_path: Path) -> None:
    """Both ends compare the fleet digest before anything moves; a wrong key does not even get that far."""
    other = tmp_path / "other.plan"
    settings = TransferSettings(stages_in_flight=2, gather_lookahead=2)
    write_plan(make_plan(Scenario(PAIR.sizes, PAIR.topology, settings, 2, "pipeline", seed=1)), other)
    plan = load_worker(other, 0)
    with running(PAIR, tmp_path, "local", connect=False) as fleet:
        for key, words in ((fleet.authkey, "RDT608.*plan: consumer 0 has"), (b"wrong", "RDT604.*does not accept")):
            model = destination_model(plan.consumer.program.parameters)
            with pytest.raises(TransferError, match=words):
                Consumer(
                    plan,
                    Destination(model, plan.consumer.program),
                    "local",
                    fleet.addresses,
                    authkey=key,
                )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_consumer_that_fails_to_connect_leaves_the_active_one(transport: str, tmp_path: Path) -> None:
    """One producer welcomes the newcomer, the other is not there: the connection that works goes on working."""
    with running(PAIR, tmp_path, transport) as fleet:
        fleet.sync(0)
        plan = load_worker(tmp_path / "fleet.plan", 0)
        model = destination_model(plan.consumer.program.parameters)
        with pytest.raises(TransferError, match=r"RDT604.*producer 1 at /nowhere"):
            Consumer(
                plan,
                Destination(model, plan.consumer.program),
                transport,
                {0: fleet.addresses[0], 1: "/nowhere"},
                authkey=fleet.authkey,
                connect_timeout_s=0.5,
            )
        fleet.sync(1)
        assert fleet.wrong(1) == {}


def test_a_receive_pool_that_does_not_fit_names_the_bytes() -> None:
    """Allocation failures name the exact bytes; nothing is lowered silently."""
    with pytest.raises(TransferError, match=r"RDT610.*4,611,686,018,427,387,904 bytes on cpu"):
        ReceivePool(PoolGeometry(2, 2, 1 << 60, "gpu"), torch.device("cpu"))


@pytest.mark.parametrize("bad", [-2, 1.0, True, "1", None])
def test_sync_idx_must_be_an_int_of_minus_one_or_more(bad: object, tmp_path: Path) -> None:
    """Anything else fails before a signal goes out; the same consumer can sync afterwards."""
    with running(Scenario(), tmp_path, "local") as fleet:
        fleet.workers[0].tell("sync", bad)
        status, text = fleet.answer(fleet.workers[0], 60)
        assert status == "error" and "sync_idx must be an int" in text
        fleet.sync(0)
        assert fleet.wrong(0) == {}


def test_missing_producers_are_named(tmp_path: Path) -> None:
    """Every rank that owns part of a group is needed, also those this worker pulls nothing from."""
    write_plan(make_plan(PAIR), tmp_path / "p")
    plan = load_worker(tmp_path / "p", 0)
    model = destination_model(plan.consumer.program.parameters)
    with pytest.raises(RdtError, match=r"needs producers \[0, 1\], no address was given for \[1\]"):
        Consumer(
            plan,
            Destination(model, plan.consumer.program),
            "local",
            {0: "/nowhere"},
            authkey=b"x",
        )
