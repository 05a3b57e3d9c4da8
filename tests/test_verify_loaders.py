"""A plan against what the loaders do now: the first difference of every kind is named, and nothing else is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve
from plans import COMPILER, MODEL, Scenario, make_plan, traces_of

from rdtplan.compiler import DryRun, plan_of
from rdtplan.ir.operations import Expression, Leaves, Node, Operations
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.regions import Region
from rdtplan.ir.topology import InferenceTopology, TransferSettings
from rdtplan.ir.traces import RankTrace
from rdtplan.verify import check_entries, check_loaders

S = Scenario(topology=InferenceTopology(2), trainer_ranks=2)
Change = Callable[[RankTrace], RankTrace]


def changed(change: Change, s: Scenario = S) -> FleetPlan:
    """The plan of a loader that does something else on worker 1."""
    traces, trace_of, _ = traces_of(s)
    traces[trace_of[1]] = change(traces[trace_of[1]])
    return plan_of(DryRun(s.manifest, s.owners, traces, trace_of, s.fleet, MODEL, COMPILER))


def put(column: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*column[:at], value, *column[at + 1 :])


def gate_takes_up(t: RankTrace) -> RankTrace:
    names = S.manifest.names
    gate, up = (names.index(f"model.layers.0.mlp.{n}_proj.weight") for n in ("gate", "up"))
    rows = tuple({gate: up, up: gate}.get(k, k) for k in t.fetches.sources)
    return evolve(t, fetches=evolve(t.fetches, sources=rows))


def drops_a_copy(t: RankTrace) -> RankTrace:
    columns = {c: getattr(t.fetches, c)[:-1] for c in type(t.fetches).__slots__ if not c.startswith("__")}
    return evolve(t, fetches=evolve(t.fetches, **columns))


def reads_rank_0(t: RankTrace) -> RankTrace:
    row = t.fetches.sources.index(S.manifest.names.index("model.layers.0.self_attn.o_proj.weight"))
    region = t.regions[t.fetches.source_regions[row]]
    regions = (*t.regions, Region(region.shape, region.stride, 0))
    return evolve(
        t,
        regions=regions,
        fetches=evolve(t.fetches, source_regions=put(t.fetches.source_regions, row, len(t.regions))),
    )


def computes(t: RankTrace) -> RankTrace:
    row = t.parameters.names.index("model.norm.weight")
    n = t.parameters.shapes[row][0]
    nodes = (Node("leaf", (), "bfloat16", (n,), (0,)), Node("neg", (0,), "bfloat16", (n,)))
    regions = (*t.regions, Region((n,), (1,), 0))
    return evolve(
        t,
        regions=regions,
        operations=Operations((row,), (len(t.regions),), (0,), (1,)),
        leaves=Leaves((row,), (len(t.regions),)),
        expressions=(Expression(nodes),),
        operation_loaders=(0,),
    )


def is_wider(t: RankTrace) -> RankTrace:
    row = t.parameters.names.index("model.norm.weight")
    shapes = t.parameters.shapes
    return evolve(t, parameters=evolve(t.parameters, shapes=(*shapes[:row], (9,), *shapes[row + 1 :])))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            gate_takes_up,
            "worker 1 (DP0 PP0 TP1): 'model.layers.0.mlp.gate_up_proj.weight' [0:4, :]: the plan takes "
            "'model.layers.0.mlp.gate_proj.weight' [4:8, :], the loader takes 'model.layers.0.mlp.up_proj.weight' "
            "[4:8, :] (weight_loader (linear.py:1)); 2 of 36 copies differ",
        ),
        (
            reads_rank_0,
            "worker 1 (DP0 PP0 TP1): 'model.layers.0.self_attn.o_proj.weight' [:, :]: the plan takes "
            "'model.layers.0.self_attn.o_proj.weight' [:, 4:8], the loader takes "
            "'model.layers.0.self_attn.o_proj.weight' [:, 0:4]",
        ),
        (
            drops_a_copy,
            "'lm_head.weight' [0:3, :]: the plan takes 'lm_head.weight' [8:11, :], the loader copies nothing",
        ),
        (
            lambda t: evolve(t, fills=evolve(t.fills, values=(2.0, 0.0))),
            "the plan fills 'model.embed_tokens.weight' [3:8, :] with 0.0 after the copies, the loader does not",
        ),
        (computes, "the plan computes nothing more, the loader computes 'model.norm.weight' by neg"),
        (is_wider, "'model.norm.weight': shape [8] in the plan, [9] in the model of this vLLM"),
    ],
)
def test_a_difference_is_named(change: Change, words: str) -> None:
    findings = check_loaders(make_plan(S), changed(change))
    assert {f.code for f in findings} == {"RDT332"} and all(f.severity == "error" for f in findings)
    assert any(words in f.sentence for f in findings), [f.sentence for f in findings]


def test_the_same_is_no_finding() -> None:
    plan = make_plan(S)
    assert check_loaders(plan, make_plan(S)) == []
    assert check_loaders(plan, changed(lambda t: evolve(t, loaders=("elsewhere (x.py:9)", "y (z.py:2)")))) == []


def test_a_difference_is_told_from_both_sides() -> None:
    """A copy that only the loader makes is found too."""
    findings = check_loaders(changed(drops_a_copy), make_plan(S))
    assert "the plan copies nothing there, the loader takes 'lm_head.weight' [8:11, :]" in findings[0].sentence


def test_other_chunks_and_another_config_are_notes() -> None:
    plan = make_plan(S)
    traces, trace_of, _ = traces_of(S)
    model = evolve(MODEL, config_digest="1" * 64)
    other = evolve(S, settings=TransferSettings(max_chunk_bytes=512))
    repacked = plan_of(DryRun(S.manifest, S.owners, traces, trace_of, other.fleet, model, COMPILER))
    findings = check_loaders(plan, repacked)
    assert [(f.code, f.severity) for f in findings] == [("RDT333", "note")] * 2
    assert "another way" in findings[1].sentence
    same = plan_of(DryRun(S.manifest, S.owners, traces, trace_of, S.fleet, model, COMPILER))
    assert [f.names for f in check_loaders(plan, same)] == [("model.config_digest",)]


def test_another_manifest_is_named() -> None:
    plan = make_plan(S)
    assert check_entries(plan, S.entries) == []
    a, b, *rest = S.entries
    findings = check_entries(plan, [evolve(b, dtype="float32"), *rest, evolve(a, name="new")])
    assert [f.code for f in findings] == ["RDT333"] * 3
    assert "the manifest does not have it" in findings[0].sentence
    assert "the plan has bfloat16" in findings[1].sentence and "has float32" in findings[1].sentence
    assert "'new': the plan does not have it" in findings[2].sentence
