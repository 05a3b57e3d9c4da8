"""Ranks side by side: no plan of the passes is found fault with, however it is cut, and single faults are found."""

from __future__ import annotations

import random

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import COMPILER, MODEL, Loader, Scenario, Sizes, View, make_plan, scenarios, traces_of

from rdtplan.compiler import DryRun, Fleet, assemble, plan_of
from rdtplan.ir.manifest import Piece, SourceTensor, build_manifest
from rdtplan.ir.pieces import chunked, whole_entries
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.regions import Region
from rdtplan.ir.topology import InferenceTopology, Position, TransferSettings
from rdtplan.ir.traces import RankTrace
from rdtplan.verify import verify_fleet
from rdtplan.verify.coverage import Prover
from rdtplan.verify.ranks import check_ranks


def sharded(s: Scenario, dims: tuple[int, ...]) -> tuple[tuple[Piece, ...], ...]:
    """Pieces of every tensor that has one of these dimensions; trainer ranks hold one each, in any order."""
    dice = random.Random(s.seed)
    found: list[tuple[Piece, ...]] = []
    for k in range(len(s.manifest)):
        shape, dim = s.manifest.shape(k), dice.choice(dims)
        ranks = dice.sample(range(s.trainer_ranks), s.trainer_ranks)
        found.append(chunked(shape, dim, ranks) if dim < len(shape) and dice.random() < 0.8 else ())
    return tuple(found)


def plan_in_pieces(s: Scenario, pieces: tuple[tuple[Piece, ...], ...]) -> FleetPlan:
    traces, trace_of, _ = traces_of(s)
    return assemble(DryRun(s.manifest, s.owners, traces, trace_of, s.fleet, MODEL, COMPILER, pieces=pieces))


@settings(max_examples=60)
@given(scenarios(), st.sampled_from(((0,), (0, 1), (2,))))
def test_no_plan_of_the_passes_is_found_fault_with(s: Scenario, dims: tuple[int, ...]) -> None:
    """Whole sources, row shards and column shards, with chunk limits that cut rows into elements."""
    assert check_ranks(plan_in_pieces(s, sharded(s, dims)), Prover()) == []


@settings(max_examples=60)
@given(scenarios(), st.sampled_from(((0,), (0, 1), (2,))))
def test_a_plan_says_what_it_was_compiled_from(s: Scenario, dims: tuple[int, ...]) -> None:
    """Manifest and owners can be read off it, however they were cut."""
    pieces = sharded(s, dims)
    plan = plan_in_pieces(s, pieces)
    wanted: dict[str, SourceTensor] = {}
    for k, entry in enumerate(s.entries):
        whole = evolve(entry, owners=s.owners[k])
        parts = tuple(evolve(p, ranks=tuple(sorted(p.ranks))) for p in pieces[k])
        if len(parts) == 1:  # a single piece is the whole
            whole, parts = evolve(entry, owners=parts[0].ranks), ()
        wanted[entry.name] = evolve(whole, owners=None, pieces=parts) if parts else whole
    found = {e.name: e for e in whole_entries(plan.manifest, plan.ownership)}
    assert found == wanted


TWO = Scenario(topology=InferenceTopology(2))


def changed(s: Scenario, worker: int, source: str, offset: int) -> list[str]:
    """Codes after the slice that one worker takes of a source was moved."""
    traces, trace_of, _ = traces_of(s)
    trace = traces[trace_of[worker]]
    k = s.manifest.names.index(source)
    row = trace.fetches.sources.index(k)
    region = trace.regions[trace.fetches.source_regions[row]]
    moved: RankTrace = evolve(
        trace,
        regions=(*trace.regions, Region(region.shape, region.stride, offset)),
        fetches=evolve(
            trace.fetches,
            source_regions=(
                *trace.fetches.source_regions[:row],
                len(trace.regions),
                *trace.fetches.source_regions[row + 1 :],
            ),
        ),
    )
    plan = plan_of(DryRun(
        s.manifest, s.owners, [*traces, moved], (*trace_of[:worker], len(traces), *trace_of[worker + 1 :]), s.fleet,
        MODEL, COMPILER,
    ))  # fmt: skip
    return [f.code for f in check_ranks(plan, Prover())]


@pytest.mark.parametrize("limit", [0, 64])
def test_a_shard_of_another_rank_is_found_behind_a_copy(limit: int) -> None:
    """Four workers, two of them copies: one copy of shard 1 is a second shard 0. Also when slices are cut."""
    sizes = Sizes(dense_layers=2, experts=1)
    s = Scenario(
        sizes, topology=InferenceTopology(2, data_parallel=2), settings=TransferSettings(max_chunk_bytes=limit)
    )
    name = "model.layers.0.self_attn.o_proj.weight"
    assert changed(s, 3, name, 4) == []
    assert set(changed(s, 3, name, 0)) == {"RDT335"}


def test_part_of_another_shard_is_found() -> None:
    assert changed(TWO, 1, "model.layers.0.self_attn.o_proj.weight", 2) == ["RDT335"]


def test_replicas_must_be_alike() -> None:
    plan = make_plan(Scenario(topology=InferenceTopology(2, replicas=2)))
    a, b, c, d = plan.consumers
    swapped = evolve(
        plan, consumers=(a, b, evolve(c, routing=evolve(c.routing, seq=(9,))), evolve(d, program=a.program))
    )
    findings = check_ranks(swapped, Prover())
    assert [f.code for f in findings] == ["RDT334", "RDT334"]
    assert "consumers[2].routing" in findings[0].sentence and "worker 1" in findings[1].sentence


def test_two_parameters_of_one_source_must_agree() -> None:
    """Head and embedding are loaded from one tensor; the head of both ranks has the first half of it."""
    manifest = build_manifest([SourceTensor("embed.weight", "bfloat16", (8, 4))])

    def plan(starts: tuple[int, int]) -> FleetPlan:
        traces = []
        for tp in (0, 1):
            out = Loader(manifest)
            for name, start in (("embed", 4 * tp), ("head", starts[tp])):
                p = out.parameter(name, "weight", (4, 4))
                out.copy(0, View.full((8, 4)).narrow(0, start, 4), p, out.view(p))
            traces.append(out.trace(Position(0, 0, tp)))
        fleet = Fleet(InferenceTopology(2))
        return plan_of(DryRun(manifest, ((0,),), traces, (0, 1), fleet, MODEL, COMPILER))

    assert check_ranks(plan((0, 4)), Prover()) == []
    findings = check_ranks(plan((0, 0)), Prover())
    assert [f.code for f in findings] == ["RDT335"]
    assert findings[0].names == ("embed.weight", "embed.weight", "head.weight")
    assert verify_fleet(plan((0, 0))) == findings
