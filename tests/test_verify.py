"""Verification: what makes a plan incomplete is found and named, and refused unless accepted by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from attrs import evolve
from forgery import with_digests, with_program
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import COMPILER, MODEL, Loader, Scenario, View, elements, make_plan, scenarios, traces_of

from rdtplan.compiler import DryRun, Fleet, assemble
from rdtplan.errors import PlanError
from rdtplan.ir.manifest import SourceTensor, build_manifest
from rdtplan.ir.plan import FleetPlan, Scatters, Waiver
from rdtplan.ir.regions import Region, canonical
from rdtplan.ir.topology import InferenceTopology, Position
from rdtplan.ir.traces import Fetches, Fills, RankTrace
from rdtplan.passes import run_passes
from rdtplan.passes.draft import Draft, ProgramDraft
from rdtplan.verify import Finding, refuse, verify_fleet, waived
from rdtplan.verify.coverage import Prover, check_destinations, check_sources, in_bytes
from rdtplan.verify.findings import WAIVABLE

ENTRIES = [
    SourceTensor("embed.w", "bfloat16", (6, 4)),
    SourceTensor("h.0.a", "bfloat16", (4, 4)),
    SourceTensor("h.0.b", "bfloat16", (4, 4)),
    SourceTensor("norm.w", "float32", (4,)),
]


def loader() -> Loader:
    """A fused parameter, a padded one, a plain one; nothing written yet."""
    out = Loader(build_manifest(ENTRIES))
    out.parameter("model.embed", "weight", (8, 4))
    out.parameter("model.0.fused", "weight", (8, 4))
    out.parameter("model.norm", "weight", (4,), "float32")
    return out


def rows(view: View, lo: int, hi: int) -> View:
    return view.narrow(0, lo, hi - lo)


def load_soundly(out: Loader) -> None:
    out.copy(0, View.full((6, 4)), 0, rows(out.view(0), 0, 6))
    out.fill(0, rows(out.view(0), 6, 8), 0.0)
    out.copy(1, View.full((4, 4)), 1, rows(out.view(1), 0, 4))
    out.copy(2, View.full((4, 4)), 1, rows(out.view(1), 4, 8))
    out.copy(3, View.full((4,)), 2, out.view(2))


def plan_of(out: Loader, waivers: tuple[Waiver, ...] = (), trace: RankTrace | None = None) -> FleetPlan:
    trace = trace or out.trace(Position(0, 0, 0))
    return assemble(
        DryRun(out.manifest, ((0,),) * len(out.manifest), [trace], (0,), Fleet(waivers=waivers), MODEL, COMPILER)
    )


def refusal(out: Loader, waivers: tuple[Waiver, ...] = (), trace: RankTrace | None = None) -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan_of(out, waivers, trace)
    return caught.value


def drop(out: Loader, write: int) -> Loader:
    return evolve(out, writes=[w for k, w in enumerate(out.writes) if k != write])


def replace_dest(out: Loader, write: int, dest: View) -> Loader:
    writes = [evolve(w, dest_view=dest) if k == write else w for k, w in enumerate(out.writes)]
    return evolve(out, writes=writes)


@pytest.fixture
def sound() -> Loader:
    out = loader()
    load_soundly(out)
    return out


def test_a_complete_plan_has_no_findings(sound: Loader) -> None:
    assert verify_fleet(plan_of(sound)) == []


# -- destinations --------------------------------------------------------------------------------------------


def test_a_gap_is_found(sound: Loader) -> None:
    """The second half of the fused parameter is never written, and its source goes nowhere."""
    error = refusal(drop(sound, 2))
    assert error.code == "RDT311"
    assert "16 of 32 elements of 'model.0.fused.weight' are never written, the first at 16 to 32" in error.message
    assert "RDT320 source name 'h.0.b' is taken by no loader of any worker" in error.message


def test_padding_that_is_not_filled_is_a_gap(sound: Loader) -> None:
    error = refusal(evolve(sound, fills=[]))
    assert error.code == "RDT311"
    assert "8 of 32 elements of 'model.embed.weight' are never written, the first at 24 to 32" in error.message


def test_a_parameter_that_no_loader_writes_is_found(sound: Loader) -> None:
    error = refusal(drop(sound, 3))
    assert error.code == "RDT310"
    assert "no loader writes parameter 'model.norm.weight'" in error.message


def test_an_unwritten_buffer_is_no_finding(sound: Loader) -> None:
    out = drop(sound, 3)
    trace = out.trace(Position(0, 0, 0))
    kinds = ("parameter", "parameter", "buffer")
    trace = evolve(trace, parameters=evolve(trace.parameters, kinds=kinds))
    assert refusal(out, trace=trace).code == "RDT320"


def test_a_double_write_is_found_though_the_count_fits(sound: Loader) -> None:
    """Both halves land in the first: as many elements are written as there are."""
    error = refusal(replace_dest(sound, 2, rows(sound.view(1), 0, 4)))
    assert error.code == "RDT312"
    assert "elements 0 to 16 of 'model.0.fused.weight' are written twice" in error.message
    assert "16 of 32 elements of 'model.0.fused.weight' are never written" in error.message


def test_a_partial_overlap_is_found(sound: Loader) -> None:
    error = refusal(replace_dest(sound, 2, rows(sound.view(1), 3, 7)))
    assert "elements 12 to 16 of 'model.0.fused.weight' are written twice" in error.message
    assert "4 of 32 elements of 'model.0.fused.weight' are never written, the first at 28 to 32" in error.message


def test_a_fill_over_fetched_rows_is_a_double_write_only_when_it_comes_late(sound: Loader) -> None:
    """`param.zero_()` before the copy is how loaders pad; after the copy it wipes what was fetched."""
    wide = [(0, sound.view(0), 0.0, 1)]
    assert verify_fleet(plan_of(evolve(sound, fills=wide))) == []
    late = [(0, sound.view(0), 0.0, 0)]
    assert refusal(evolve(sound, fills=late)).code == "RDT312"


def test_a_write_outside_its_parameter_is_found(sound: Loader) -> None:
    outside = View((4, 4), (4, 1), 20)
    error = refusal(replace_dest(sound, 2, outside))
    assert error.code == "RDT313" and "it leaves parameter 'model.0.fused.weight'" in error.message
    trace = replace_dest(sound, 2, outside).trace(Position(0, 0, 0))
    draft = run_passes(
        Draft(
            sound.manifest,
            ((0,),) * 4,
            1,
            Fleet().topology,
            Fleet().settings,
            (ProgramDraft(trace),),
            (0,),
        )
    )
    program = (
        with_program(plan_of(sound), scatters=draft.programs[0].scatters, regions=draft.programs[0].trace.regions)
        .consumers[0]
        .program
    )
    findings = check_destinations(program, Prover(), "worker 0")
    assert [f.code for f in findings] == ["RDT313", "RDT311"]
    assert "a write into 'model.0.fused.weight' spans elements 20 to 36, it has 32" in findings[0].sentence


def test_the_padding_inside_a_strided_parameter_is_outside_of_it(sound: Loader) -> None:
    """A parameter with rows of 3 in memory of 4: a write of 4 a row is not inside, and not exact."""
    plan = plan_of(sound)
    p = plan.consumers[0].program.parameters
    padded = evolve(p, shapes=((8, 3), *p.shapes[1:]))
    findings = verify_fleet(with_digests(with_program(plan, parameters=padded)))
    assert [f.code for f in findings] == ["RDT313"] and "model.embed.weight" in findings[0].sentence


# -- sources -------------------------------------------------------------------------------------------------


def test_a_source_that_nobody_takes_is_found(sound: Loader) -> None:
    entries = [*ENTRIES, SourceTensor("mtp.0.w", "bfloat16", (2,)), SourceTensor("empty", "bfloat16", (0, 3))]
    error = refusal(evolve(sound, manifest=build_manifest(entries)))
    assert error.code == "RDT320" and "1 finding:" in error.message
    assert "source name 'mtp.0.w' is taken by no loader of any worker" in error.message
    assert "--waive RDT320:PATTERN" in error.fix


def half_taken(sound: Loader) -> Loader:
    """`h.0.b` has eight rows of which the loader takes four."""
    entries = [evolve(e, shape=(8, 4)) if e.name == "h.0.b" else e for e in ENTRIES]
    return evolve(sound, manifest=build_manifest(entries))


def test_a_source_that_is_partly_taken_is_found(sound: Loader) -> None:
    error = refusal(half_taken(sound))
    assert error.code == "RDT321"
    assert "16 of 32 elements of source 'h.0.b' reach no worker, the first at 16 to 32" in error.message


def test_what_other_ranks_take_counts() -> None:
    """A source is consumed by the fleet, not by every worker: one rank of two takes half of what is sharded."""
    plan = make_plan(Scenario(topology=InferenceTopology(tensor_parallel=2)))
    first, second = (c.program for c in plan.consumers)
    findings = check_sources(plan.manifest, [first], Prover())
    names = {name for f in findings for name in f.names}
    assert {f.code for f in findings} == {"RDT321"}
    assert "model.layers.0.self_attn.o_proj.weight" in names
    assert "model.layers.0.input_layernorm.weight" not in names
    assert check_sources(plan.manifest, [first, second], Prover()) == []


def retyped(sound: Loader, region: Region) -> RankTrace:
    """`h.0.b` is read as bytes (`.view(torch.uint8)`), as loaders of packed formats do."""
    out = evolve(sound, dtypes=["bfloat16", "uint8", "float32"], shapes=[(8, 4), (48, 1), (4,)])
    out = replace_dest(out, 1, View((4, 4), (4, 1), 0))
    out = replace_dest(out, 2, View((region.numel,), (1,), 16))
    trace = out.trace(Position(0, 0, 0))
    regions = list(trace.regions)
    regions.append(region)
    f = trace.fetches
    return evolve(
        trace,
        regions=tuple(regions),
        dtype_table=("bfloat16", "float32", "uint8"),
        fetches=evolve(
            f,
            dtypes=(*f.dtypes[:2], 2, f.dtypes[3]),
            source_regions=(*f.source_regions[:2], len(regions) - 1, f.source_regions[3]),
        ),
    )


def test_a_source_read_under_another_dtype_is_covered_in_bytes(sound: Loader) -> None:
    assert verify_fleet(plan_of(sound, trace=retyped(sound, Region((32,), (1,), 0)))) == []
    error = refusal(sound, trace=retyped(sound, Region((16, 2), (2, 1), 0)))
    assert error.code == "RDT330" and "is no region in canonical form" in error.message
    error = refusal(sound, trace=retyped(sound, Region((30,), (1,), 2)))
    assert "2 of 32 bytes of source 'h.0.b' reach no worker, the first at 0 to 2" in error.message


@given(st.lists(st.integers(1, 4), max_size=3), st.integers(0, 4), st.sampled_from((1, 2, 4)), st.data())
def test_bytes_of_a_region(shape: list[int], offset: int, size: int, data: st.DataObject) -> None:
    stride = [data.draw(st.integers(0, 12)) for _ in shape]
    region = canonical(shape, stride, offset)
    wanted = [e * size + b for e, b in product(elements(region), range(size))]
    assert elements(in_bytes(region, size)) == wanted


def test_a_read_outside_its_source_is_found(sound: Loader) -> None:
    writes = list(sound.writes)
    writes[3] = evolve(writes[3], source_view=View((4,), (1,), 1))
    error = refusal(evolve(sound, writes=writes))
    assert error.code == "RDT314" and "the slice leaves 'norm.w': it ends at byte 20 of 16" in error.message


def test_a_key_that_goes_nowhere_does_not_count_as_consumed(sound: Loader) -> None:
    """Pulled bytes that no scatter uses would make an orphan look taken."""
    plan = plan_of(sound)

    def lonely(scatters: Scatters) -> Scatters:
        return evolve(scatters, key=(0, 1, 1, 3))

    findings = verify_fleet(with_program(plan, scatters=lonely))
    assert any("goes nowhere" in f.sentence for f in findings)


def test_a_source_that_is_no_whole_number_of_elements_is_found(sound: Loader) -> None:
    """Five bytes cannot be viewed as bfloat16, though a slice of two elements is inside."""
    out = evolve(sound, manifest=build_manifest([*ENTRIES, SourceTensor("odd", "uint8", (5,))]))
    p = out.parameter("model.odd", "weight", (2,))
    out.copy(4, View.full((2,)), p, View.full((2,)))
    trace = out.trace(Position(0, 0, 0))
    as_bfloat16 = evolve(trace, dtype_table=("bfloat16", "float32", "bfloat16"))
    error = refusal(out, trace=as_bfloat16)
    assert error.code == "RDT330" and "'odd' has 5 bytes, no whole number of elements" in error.message


# -- what the passes would never do --------------------------------------------------------------------------


def test_chunks_against_the_order_of_gathering_are_found(sound: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer publishes groups in order; a worker that asks for the last one first waits for ever."""
    backwards = lambda bins: sorted(bins)[::-1]  # noqa: E731
    monkeypatch.setattr(sys.modules["rdtplan.passes.pack_chunks"], "sorted", backwards, raising=False)
    error = refusal(sound)
    assert error.code == "RDT330" and "chunks.group: chunks must stand in the order" in error.message


def test_a_module_of_two_streams_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that forgot to refuse it: one module, two layers, an owner each."""
    out = Loader(build_manifest([SourceTensor(f"h.{k}.w", "bfloat16", (2,)) for k in (0, 1)]))
    for k, name in enumerate(("a", "b")):
        p = out.parameter("shared", name, (2,))
        out.copy(k, View.full((2,)), p, View.full((2,)))

    def set_streams(_: Draft, program: ProgramDraft, component_of: tuple[int, ...]) -> ProgramDraft:
        assert program.chunks is not None
        streams = tuple(component_of[g] for g in program.chunks.group)
        return evolve(program, chunks=evolve(program.chunks, stream=streams))

    def compiled() -> FleetPlan:
        trace = out.trace(Position(0, 0, 0))
        return assemble(DryRun(out.manifest, ((0,), (1,)), [trace], (0,), Fleet(trainer_ranks=2), MODEL, COMPILER))

    with pytest.raises(PlanError) as caught:
        compiled()
    assert caught.value.code == "RDT303"
    monkeypatch.setattr(sys.modules["rdtplan.passes.connect_streams"], "_set_streams", set_streams)
    with pytest.raises(PlanError) as caught:
        compiled()
    assert caught.value.code == "RDT330"
    assert "module 'shared' takes weights from two streams" in caught.value.message


# -- any single fault ----------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(scenarios(chunk_limits=(0,)), st.data())
def test_any_lost_or_repeated_write_is_found(s: Scenario, data: st.DataObject) -> None:
    """Take one fetch or fill out of a sound fleet, or send a fetch where another goes: never sound again."""
    traces, trace_of, _ = traces_of(s)
    at = data.draw(st.integers(0, len(traces) - 1))
    trace = traces[at]
    fetches, fills = trace.fetches, trace.fills
    kind = data.draw(st.sampled_from(["lose", "repeat"] + ["unfill"] * bool(len(fills))))
    if kind == "unfill":
        k = data.draw(st.integers(0, len(fills) - 1))
        trace = evolve(trace, fills=evolve(fills, **_without(fills, k)), fill_loaders=trace.fill_loaders[1:])
    elif len(fetches) and kind == "lose":
        k = data.draw(st.integers(0, len(fetches) - 1))
        trace = evolve(trace, fetches=evolve(fetches, **_without(fetches, k)))
    elif len(fetches):
        k = data.draw(st.integers(0, len(fetches) - 1))
        twice = {n: (*getattr(fetches, n), getattr(fetches, n)[k]) for n in FETCH_COLUMNS}
        trace = evolve(trace, fetches=evolve(fetches, **twice))
    else:
        return
    traces[at] = trace
    with pytest.raises(PlanError) as caught:
        assemble(DryRun(s.manifest, s.owners, traces, trace_of, s.fleet, MODEL, COMPILER))
    wanted = {"lose": ("RDT310", "RDT311"), "unfill": ("RDT310", "RDT311"), "repeat": ("RDT312",)}[kind]
    assert caught.value.code in wanted


FETCH_COLUMNS = ("sources", "dtypes", "source_regions", "parameters", "dest_regions", "loaders", "chains")


def _without(table: Fetches | Fills, k: int) -> dict[str, Any]:
    names = FETCH_COLUMNS if hasattr(table, "sources") else ("parameters", "regions", "values", "before")
    return {n: getattr(table, n)[:k] + getattr(table, n)[k + 1 :] for n in names}


def test_a_tied_weight_that_is_sent_twice_is_a_note(sound: Loader) -> None:
    """The tied name goes nowhere, as in vLLM; a plan that has it is complete, and says so."""
    entries = [
        *ENTRIES,
        SourceTensor("head.weight", "bfloat16", (6, 4)),
        SourceTensor("ahead.weight", "bfloat16", (1,)),
    ]
    out = evolve(sound, manifest=build_manifest(entries), aliases=[("model.head.weight",), (), ()])
    assert "'ahead.weight' is taken by no loader" in refusal(out).message
    assert "'head.weight' is taken" not in refusal(out).message.replace("'ahead.weight'", "")
    out = evolve(out, manifest=build_manifest(entries[:-1]))
    plan = plan_of(out)
    assert [(f.code, f.severity) for f in verify_fleet(plan)] == [("RDT322", "note")]
    assert plan.notes[-1].startswith("source name 'head.weight' goes nowhere: the model ties 'model.head.weight' to")


# -- waivers -------------------------------------------------------------------------------------------------


def test_a_parameter_may_keep_its_value_by_name(sound: Loader) -> None:
    entries = [e for e in ENTRIES if e.name != "norm.w"]
    out = evolve(drop(sound, 3), manifest=build_manifest(entries))
    assert refusal(out).code == "RDT310"
    for wrong in (
        Waiver("RDT310", "model.norm"),
        Waiver("RDT320", "model.norm.weight"),
        Waiver("RDT311", "*"),
    ):
        assert refusal(out, (wrong,)).code == "RDT310"
    plan = plan_of(out, (Waiver("RDT310", "*.norm.*"),))
    assert plan.consumers[0].program.untouched == ("model.norm.weight", "model.rotary_emb.cos_sin_cache")
    assert plan.consumers[0].program.untouched_reasons[0] == "accepted: --waive RDT310:*.norm.*"
    assert plan.waivers == (Waiver("RDT310", "*.norm.*"),)
    assert [f.code for f in verify_fleet(plan)] == ["RDT310"]
    refuse(verify_fleet(plan), plan.waivers)


def test_a_source_may_go_nowhere_by_name(sound: Loader) -> None:
    entries = [*ENTRIES, SourceTensor("mtp.0.a", "bfloat16", (2,)), SourceTensor("mtp.1.a", "bfloat16", (2,))]
    out = evolve(sound, manifest=build_manifest(entries))
    assert "2 findings" in refusal(out).message
    error = refusal(out, (Waiver("RDT320", "mtp.0.*"),))
    assert "1 finding:" in error.message and "mtp.1.a" in error.message
    assert plan_of(out, (Waiver("RDT320", "mtp.[01].a"),)).waivers
    assert plan_of(out, (Waiver("RDT320", "mtp.0.a"), Waiver("RDT320", "*.1.a"))).waivers


def test_part_of_a_source_may_go_nowhere_by_name(sound: Loader) -> None:
    assert plan_of(half_taken(sound), (Waiver("RDT321", "h.*.b"),))
    assert refusal(half_taken(sound), (Waiver("RDT320", "h.*.b"),)).code == "RDT321"


@pytest.mark.parametrize("code", ["RDT311", "RDT312", "RDT313", "RDT314", "RDT330"])
def test_what_would_move_wrong_bytes_cannot_be_waived(sound: Loader, code: str) -> None:
    assert code not in WAIVABLE
    anything = Waiver(code, "*")
    finding = Finding(code, "a sentence", ("a.weight",))
    assert not waived(finding, [anything])
    with pytest.raises(PlanError):
        refuse([finding], [anything])
    faults: dict[str, Callable[[], Loader]] = {
        "RDT311": lambda: evolve(sound, fills=[]),
        "RDT312": lambda: replace_dest(sound, 2, rows(sound.view(1), 0, 4)),
        "RDT313": lambda: replace_dest(sound, 2, View((4, 4), (4, 1), 20)),
    }
    if code in faults:
        assert refusal(faults[code](), (anything,)).code == code


def test_a_finding_is_waived_only_when_all_its_names_are() -> None:
    finding = Finding("RDT320", "two names", ("a.w", "b.w"))
    assert not waived(finding, [Waiver("RDT320", "a.*")])
    assert waived(finding, [Waiver("RDT320", "a.*"), Waiver("RDT320", "b.*")])
    assert not waived(Finding("RDT320", "no name"), [Waiver("RDT320", "*")])
    assert not waived(finding, [Waiver("RDT320", "A.*"), Waiver("RDT320", "B.*")])


def test_a_refusal_lists_the_first_findings_and_counts_the_rest() -> None:
    findings = [Finding("RDT320", f"source {k}", (f"n{k}",)) for k in range(20)]
    with pytest.raises(PlanError) as caught:
        refuse(findings)
    lines = caught.value.message.splitlines()
    assert lines[0] == "the plan is not complete, 20 findings:"
    assert len(lines) == 14 and lines[-1] == "  ... and 8 more"
    refuse([])
    refuse([evolve(findings[0], severity="warning")])
    assert str(findings[0]) == "RDT320 error: source 0"


def test_routing_of_the_last_worker_that_is_too_long_is_a_finding() -> None:
    """The checks of producers count on routing of one length, so they come only where it is sound."""
    plan = make_plan(Scenario(topology=InferenceTopology(2)))
    last = plan.consumers[-1]
    producers = (*last.routing.producer, last.routing.producer[-1])
    longer = evolve(last, routing=evolve(last.routing, producer=producers))
    findings = verify_fleet(evolve(plan, consumers=(*plan.consumers[:-1], longer)))
    assert [f.code for f in findings] == ["RDT330"] and "routing" in findings[0].sentence
