"""Experts under EPLB: placed by a pure pass, proved by the verifier, and held to where the workers have them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner
from forgery import with_digests
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import COMPILER, MODEL, Scenario, Sizes, first_placement, load, make_plan, scenarios, traces_of

import rdtplan
from rdtplan.cli import main
from rdtplan.compiler import DryRun, assemble, check_fleet_input, place_experts
from rdtplan.errors import InputError, PlanError, TraceError
from rdtplan.inputs.experts import read_placement
from rdtplan.ir.file import PlanFile
from rdtplan.ir.operations import Leaves, Operations
from rdtplan.ir.plan import FleetPlan, Program
from rdtplan.ir.topology import InferenceTopology, positions
from rdtplan.ir.view import PlanInMemory, placement_of
from rdtplan.report.inspect import render_summary, summarize
from rdtplan.verify import check_loaders, verify_fleet
from tests import oracle

ROOT = Path(__file__).resolve().parent.parent
LAYER = "model.layers.1.mlp.experts"
EPLB = Scenario(
    sizes=Sizes(layers=3, experts=8),
    topology=InferenceTopology(tensor_parallel=2, expert_parallel=True, redundant_experts=4),
    trainer_ranks=2,
)
OTHER = (7, 6, 5, 4, 3, 2, 1, 0, 7, 7, 7, 7)


@pytest.fixture(scope="module")
def plan() -> FleetPlan:
    return make_plan(EPLB)


def refused(action: Callable[[], Any]) -> Any:
    with pytest.raises((InputError, PlanError, TraceError)) as caught:
        action()
    return caught.value


def writes(plan: FleetPlan, consumer: int) -> set[tuple[Any, ...]]:
    p = plan.consumers[consumer].program
    return {
        (p.keys.source[key], p.regions[p.keys.region[key]], row, p.regions[dest])
        for key, row, dest in zip(p.scatters.key, p.scatters.parameter, p.scatters.region, strict=True)
    }


def edited(plan: FleetPlan, worker: int, program: Program) -> FleetPlan:
    """The plan with another program for one worker, sealed again."""
    consumers = (
        *plan.consumers[:worker],
        evolve(plan.consumers[worker], program=program),
        *plan.consumers[worker + 1 :],
    )
    return with_digests(evolve(plan, consumers=consumers))


# -- against the loaders -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(scenarios(chunk_limits=(0, 0, 48)), st.data())
def test_a_placed_plan_is_that_of_loaders_with_its_map(s: Scenario, data: st.DataObject) -> None:
    """Whatever the fleet and the map: the same copies as loaders make that have the map, and a sound plan."""
    before = make_plan(s)
    rows = placement_of(PlanInMemory(before))
    assume(rows)
    logical = s.sizes.experts
    placement = {
        module: tuple(
            data.draw(st.permutations([*range(logical), *(slot % logical for slot in range(logical, len(row)))]))
        )
        for module, row in rows.items()
    }
    after = place_experts(before, placement)
    assert placement_of(PlanInMemory(after)) == placement
    if not s.settings.max_chunk_bytes:
        for k, position in enumerate(positions(s.topology)):
            trace = load(s.sizes, s.manifest, s.topology, position, placement).trace(position)
            f, names = trace.fetches, before.manifest.names
            wanted = {
                (names.index(s.manifest.names[source]), trace.regions[a], row, trace.regions[b])
                for source, a, row, b in zip(f.sources, f.source_regions, f.parameters, f.dest_regions, strict=True)
            }
            assert writes(after, k) == wanted
    same = all(row == first_placement(s.sizes, s.topology) for row in placement.values())
    assert (after.identity == before.identity) == same


def test_a_plan_that_is_placed_anew_is_the_one_that_is_compiled_so(plan: FleetPlan) -> None:
    """Out of the old plan or out of traces: one identity, for slices that are not cut; and back again."""
    traces, trace_of, _ = traces_of(EPLB)
    fleet = evolve(EPLB.fleet, placement=OTHER)
    compiled = assemble(DryRun(EPLB.manifest, EPLB.owners, traces, trace_of, fleet, MODEL, COMPILER))
    placed = place_experts(plan, OTHER)
    assert placed.identity == compiled.identity != plan.identity
    back = place_experts(placed, first_placement(EPLB.sizes, EPLB.topology))
    assert [writes(back, k) for k in range(2)] == [writes(plan, k) for k in range(2)]
    assert {c.digest for c in placed.consumers}.isdisjoint(c.digest for c in plan.consumers)


def test_where_vllm_starts_is_in_no_digest(plan: FleetPlan) -> None:
    """Another release may start elsewhere: a plan that writes the same places is the same plan."""
    traces, trace_of, _ = traces_of(EPLB)
    traces = [evolve(t, experts=evolve(t.experts, initial=t.experts.initial[::-1])) for t in traces]
    assert (
        assemble(DryRun(EPLB.manifest, EPLB.owners, traces, trace_of, EPLB.fleet, MODEL, COMPILER)).identity
        == plan.identity
    )


def test_a_replica_on_the_same_worker_is_fetched_once(plan: FleetPlan) -> None:
    placed = place_experts(plan, OTHER)  # worker 1 has slots 6 to 11: experts 1 and 0, and 7 four times
    assert placed.overview.pulled_nbytes[1] < plan.overview.pulled_nbytes[1]
    program = placed.consumers[1].program
    seven = [k for k, s in enumerate(program.keys.source) if f"{LAYER}.7.gate" in placed.manifest.names[s]]
    assert len(seven) == 1 and program.scatters.key.count(seven[0]) == 4


def test_slots_that_loaders_leave_empty_are_loaded() -> None:
    """vLLM's loaders for checkpoints with one tensor for all experts know nothing of redundant slots."""
    traces, trace_of, _ = traces_of(EPLB)
    trace = traces[1]  # slots 6 to 11; from the third on they are redundant
    size = {row: trace.parameters.strides[row][0] for row in trace.experts.parameters}
    f = trace.fetches
    kept = [
        row not in size or trace.regions[dest].offset < 2 * size[row]
        for row, dest in zip(f.parameters, f.dest_regions, strict=True)
    ]
    columns = {a: tuple(x for x, k in zip(getattr(f, a), kept, strict=True) if k) for a in f.__slots__ if a[0] != "_"}
    traces[1] = evolve(trace, fetches=evolve(f, **columns))
    found = assemble(DryRun(EPLB.manifest, EPLB.owners, traces, trace_of, EPLB.fleet, MODEL, COMPILER))
    assert writes(found, 1) == writes(make_plan(EPLB), 1)
    assert "leave 8 redundant slots of experts empty" in found.notes[0]


def test_a_write_that_is_lost_stays_lost() -> None:
    """A slot that is loaded in part is no empty slot: it is incomplete, and so is every slot that takes after it."""
    traces, trace_of, _ = traces_of(EPLB)
    trace = traces[0]
    lost = next(k for k, p in enumerate(trace.fetches.parameters) if p == trace.experts.parameters[0])
    f = trace.fetches
    columns = {a: (*getattr(f, a)[:lost], *getattr(f, a)[lost + 1 :]) for a in f.__slots__ if a[0] != "_"}
    traces[0] = evolve(trace, fetches=evolve(f, **columns))
    for placement in (None, OTHER):
        fleet = evolve(EPLB.fleet, placement=placement)
        error = refused(
            lambda f=fleet: assemble(DryRun(EPLB.manifest, EPLB.owners, traces, trace_of, f, MODEL, COMPILER))
        )
        assert error.code == "RDT311"


def test_slots_that_are_computed_cannot_change_hands() -> None:
    traces, trace_of, _ = traces_of(EPLB)
    row = traces[0].experts.parameters[0]
    name = traces[0].parameters.names[row]
    computed = evolve(traces[0], operations=Operations((row,), (0,), (0,), (1,)), leaves=Leaves((0,), (0,)))
    read = evolve(traces[0], operations=Operations((0,), (0,), (0,), (1,)), leaves=Leaves((row,), (0,)))
    fills = traces[0].fills
    region = traces[0].fetches.dest_regions[traces[0].fetches.parameters.index(row)]
    filled = evolve(
        fills,
        parameters=(*fills.parameters, row),
        regions=(*fills.regions, region),
        values=(*fills.values, 0.0),
        before=(*fills.before, 1),
    )
    partly = evolve(traces[0], fills=filled, fill_loaders=(*traces[0].fill_loaders, 0))
    for trace in (computed, read, partly):
        fleet = evolve(EPLB.fleet, placement=OTHER)
        given = [trace, traces[1]]
        error = refused(
            lambda g=given, f=fleet: assemble(DryRun(EPLB.manifest, EPLB.owners, g, trace_of, f, MODEL, COMPILER))
        )
        assert error.code == "RDT306" and repr(name) in error.message


# -- what does not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ((0, 1), f"layer {LAYER!r} has 2 slots, the model 12"),
        ((*range(8), 0, 1, 2, 8), f"layer {LAYER!r} has expert 8 in slot 11, its experts are 0 to 7"),
        ((-1, *range(8), 0, 1, 2), "has expert -1 in slot 0"),
        ((*range(6), *range(6)), "has expert 6 in no slot, and 1 more are missing"),
        ({LAYER: OTHER}, "'model.layers.2.mlp.experts': the placement does not have it"),
        ({LAYER: OTHER, "model.layers.2.mlp.experts": OTHER, "x": OTHER}, "'x': the model has no such layer"),
    ],
)
def test_a_placement_that_does_not_fit(plan: FleetPlan, placement: Any, words: str) -> None:
    error = refused(lambda: place_experts(plan, placement))
    assert error.code == "RDT120" and words in error.message and error.fix, error


def test_a_placement_without_eplb() -> None:
    dense = make_plan(Scenario(topology=InferenceTopology(2)))
    assert refused(lambda: place_experts(dense, OTHER)).code == "RDT120"
    error = refused(lambda: check_fleet_input(evolve(EPLB.fleet, topology=evolve(EPLB.topology, redundant_experts=-1))))
    assert error.code == "RDT108" and "redundant_experts must be 0 or more, is -1" in error.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("3", "expected a list of experts, found int 3"),
        ("[0, true]", "expected the number of an expert in slot 1, found True"),
        ('{"a": [0, 1.5]}', "layer 'a': expected the number of an expert in slot 1, found 1.5"),
        ('{"a": {}}', "layer 'a': expected a list of experts, found dict"),
    ],
)
def test_a_file_that_is_no_placement(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    error = refused(lambda: read_placement(tmp_path / "p.json"))
    assert error.code == "RDT120" and words in error.message


# -- proofs ----------------------------------------------------------------------------------------------------------


def in_slot(program: Program, slot: int, name: str) -> list[int]:
    """Scatters into one slot (of the worker) of one parameter of the first layer."""
    row = program.parameters.names.index(f"{LAYER}.{name}")
    size = program.parameters.strides[row][0]
    s = program.scatters
    return [
        k
        for k, (p, d) in enumerate(zip(s.parameter, s.region, strict=True))
        if p == row and program.regions[d].offset // size == slot
    ]


def exchanged(plan: FleetPlan, worker: int, a: int, b: int, names: tuple[str, ...]) -> FleetPlan:
    """What two slots of one worker are loaded from, the other way round."""
    program = plan.consumers[worker].program
    keys = list(program.scatters.key)
    for name in names:
        for x, y in zip(in_slot(program, a, name), in_slot(program, b, name), strict=True):
            keys[x], keys[y] = keys[y], keys[x]
    return edited(plan, worker, evolve(program, scatters=evolve(program.scatters, key=tuple(keys))))


BOTH = ("w13_weight", "w2_weight")


@pytest.mark.parametrize("names", [BOTH, ("w2_weight",)])
def test_reordered_replicas_are_found(plan: FleetPlan, names: tuple[str, ...]) -> None:
    """Worker 1 has slots 6 to 11 (experts 6, 7, 0, 1, 2, 3). Experts 0 and 1 exchanged: those of worker 0 tell."""
    assert verify_fleet(plan) == []
    codes = {f.code for f in verify_fleet(exchanged(plan, 1, 2, 3, names))}
    assert codes == {"RDT338"}
    found = verify_fleet(exchanged(plan, 1, 2, 3, names))[0]
    assert "slots 0 and 8 both hold expert 0, and are not loaded alike" in found.sentence


def test_a_placement_that_is_not_what_is_loaded_is_found(plan: FleetPlan) -> None:
    """The slots have what another map wants, all workers alike: slots of one expert differ, others have the same."""
    lied = place_experts(plan, (0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7))
    says = (1, 0, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7)
    for worker in range(2):
        experts = evolve(lied.consumers[worker].program.experts, experts=says * 2)
        lied = edited(lied, worker, evolve(lied.consumers[worker].program, experts=experts))
    found = verify_fleet(lied)
    assert {f.code for f in found} == {"RDT338"}
    assert any("and both take the same of" in f.sentence for f in found)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"experts": (9,) + (0,) * 23}, "experts.experts"),
        ({"experts": (0,) * 24}, "experts.experts"),
        ({"slot_end": (12, 25)}, "experts.slot_end"),
        ({"slot_end": (12,)}, "experts.modules"),
        ({"initial": ()}, "experts.initial"),
        ({"parameters": (99, 1, 2, 3)}, "experts.parameters"),
        ({"layers": (0, 0, 2, 1)}, "experts.layers"),
        ({"layers": (1, 1, 0, 0)}, "experts.layers"),
        ({"first": (7, 7, 7, 7)}, "experts.first"),
        ({"first": (0, 0, 0, 0)}, "dealt"),
        ({"first": (-1, 6, 6, 6)}, "experts.first"),
        ({"logical": (7, 8)}, "experts.experts"),
    ],
)
def test_a_table_that_cannot_be_is_found(plan: FleetPlan, change: dict[str, Any], field: str) -> None:
    program = plan.consumers[1].program
    found = verify_fleet(edited(plan, 1, evolve(program, experts=evolve(program.experts, **change))))
    assert found and found[0].code == "RDT330" and field in found[0].sentence, found[:2]


def test_workers_must_have_one_placement(plan: FleetPlan) -> None:
    program = plan.consumers[1].program
    other = evolve(program.experts, experts=(*program.experts.experts[:10], 3, 2, *program.experts.experts[12:]))
    found = verify_fleet(edited(plan, 1, evolve(program, experts=other)))
    assert found[0].code == "RDT330" and "placed otherwise than on the first worker" in found[0].sentence


def test_slots_that_are_anothers_are_found_by_the_loaders(plan: FleetPlan) -> None:
    """Without redundant experts two workers may exchange their slots and nothing in the plan tells: the model does."""
    alone = make_plan(evolve(EPLB, topology=evolve(EPLB.topology, redundant_experts=0)))
    other = alone
    for worker in range(2):
        program = alone.consumers[worker].program
        first = alone.consumers[1 - worker].program.experts.first
        other = edited(other, worker, evolve(program, experts=evolve(program.experts, first=first)))
    assert verify_fleet(other) == []
    found = check_loaders(other, alone)
    assert [f.code for f in found] == ["RDT332", "RDT332"] and "experts.first: (4, 4, 4, 4)" in found[0].sentence
    assert check_loaders(alone, alone) == []


# -- reports and the command line ------------------------------------------------------------------------------------


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_command_line(plan: FleetPlan, tmp_path: Path) -> None:
    """An old plan and the workers' placement make the new one, without vLLM; diff and inspect say so."""
    old, new, rows = tmp_path / "old.plan", tmp_path / "new.plan", tmp_path / "rows.json"
    rdtplan.save(plan, old)
    rows.write_text(
        json.dumps({LAYER: OTHER, "model.layers.2.mlp.experts": first_placement(EPLB.sizes, EPLB.topology)})
    )
    done = run("compile", "--from", old, "--expert-placement", rows, "-o", new)
    assert done.exit_code == 0, done.output
    assert rdtplan.load(new).identity == rdtplan.place_experts(old, rows).identity
    assert run("verify", new).exit_code == 0
    done = run("diff", old, new)
    assert done.exit_code == 2
    assert done.output.startswith(f"different: expert placement: {LAYER} slot 0: expert 0 -> expert 7, and 11 more\n")
    with PlanFile(old) as a, PlanFile(new) as b:
        assert "EPLB: 16 and 8 redundant in 2 layers; as vLLM starts" in "\n".join(render_summary(summarize(a), 120))
        summary = summarize(b)
        assert "12 slots with another expert than where vLLM starts" in "\n".join(render_summary(summary, 120))
    assert summary["experts"] == {"layers": 2, "experts": 16, "slots": 24, "moved": 12}
    for wrong, words in (
        (("--from", old), "there is nothing to change"),
        (("--from", old, "--expert-placement", rows, "--tp", 2), "--tp cannot be changed"),
        ((tmp_path, "--from", old, "--expert-placement", rows), "CONFIG_DIR cannot be changed"),
        ((), "give CONFIG_DIR"),
    ):
        done = run("compile", *wrong, "-o", new)
        assert done.exit_code == 1 and words in done.output, done.output


def test_a_plan_without_eplb_says_nothing_of_it(tmp_path: Path) -> None:
    rdtplan.save(make_plan(), tmp_path / "p")
    with PlanFile(tmp_path / "p") as file:
        assert summarize(file)["experts"] is None
        assert b"redundant_experts" not in (tmp_path / "p").read_bytes()
        assert b'"experts"' not in (tmp_path / "p").read_bytes()


# -- vLLM ------------------------------------------------------------------------------------------------------------


def lines_of(script: str) -> list[Any]:
    """The JSON that a script prints; it becomes a process of a GPU target."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / script)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(('["', '{"'))]


def test_placed_experts_are_exact() -> None:
    """Every byte of every parameter, scales included, is what stock vLLM leaves with the wanted map."""
    from tests.placements import CASES, INCOMPLETE

    found = dict(lines_of("placements.py"))
    assert set(found) == {*CASES, *INCOMPLETE}
    for name, rounds in found.items():
        assert len(rounds) >= 2
        for number, round in enumerate(rounds):
            assert round["different"] == {} and round["traced"] and round["compared"] > 20, (name, round)
            assert round["same as before"] == (number == 0), (name, number)
            assert [f for f in round["loaders"] if " note: " not in f] == [], (name, round)
            assert round["same as compiled"] or name.endswith("+cut"), (name, number)
    assert any(round["rows"] > 1 for rounds in found.values() for round in rounds)
    assert "leave 8 redundant slots" in found["bf16-moe+fused"][0]["notes"][0]


def test_a_worker_is_held_to_the_placement() -> None:
    """vLLM's own model and EPLB tables under the real engine: right plans are executed, wrong ones are refused."""
    (found,) = lines_of("eplb_worker.py")
    for name in ("first", "placed anew", "mended"):
        assert found[name] == [], (name, found[name])
    assert found["told apart"] and found["compared"] > 20
    assert found["async"].startswith("RDT111") and "eplb_config.use_async" in found["async"]
    assert found["compiled at init"].startswith("RDT111") and "--expert-placement" in found["compiled at init"]
    assert "for workers without EPLB, this one runs with EPLB and 4 redundant experts" in found["no EPLB in the plan"]
    assert "for workers with EPLB and 4 redundant experts, this one runs without" in found["no EPLB in the worker"]
    slot = "layer 'model.layers.0.mlp.experts.routed_experts', slot 0: the plan writes expert"
    for name in ("moved", "moved, anew"):
        assert found[name].startswith(f"RDT519: {slot} 0 there, this worker holds expert 7; 11 more slots"), found[name]
        assert "live_placement" in found[name] and "compile --from" in found[name]
    assert found["moved in a sync"].startswith(f"RDT519: {slot} 7 there, this worker holds expert 0")
    assert found["finish"].startswith("RDT605") and "no expert in slot 11 of 12" in found["impossible"]
    said = found["trainer"]
    assert [bool(x) for x in said] == [False, False, True, False] and slot in said[2]


def test_a_loader_that_knows_no_redundant_experts_is_refused(tmp_path: Path) -> None:
    """Llama 4 takes rows of all experts by slot; redundant slots have none, and on meta nobody would notice."""
    error = refused(
        lambda: rdtplan.compile(
            oracle.corpus_config("Llama4ForCausalLM", tmp_path),
            oracle.corpus_manifest("Llama4ForCausalLM"),
            tensor_parallel=2,
            expert_parallel=True,
            redundant_experts=4,
            target="sm90",
            jobs=1,
        )
    )
    assert error.code == "RDT207" and "row 8 of a tensor with 8 rows" in error.message


def test_eplb_is_for_gpus(tmp_path: Path) -> None:
    """vLLM says so itself; here the reason is passed on."""
    config_dir, entries = (
        oracle.corpus_config("Qwen3MoeForCausalLM", tmp_path),
        oracle.corpus_manifest("Qwen3MoeForCausalLM"),
    )
    error = refused(
        lambda: rdtplan.compile(
            config_dir, entries, tensor_parallel=2, expert_parallel=True, redundant_experts=0, jobs=1
        )
    )
    assert error.code == "RDT102" and "only supported on CUDA" in error.message
