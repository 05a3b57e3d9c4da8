"""The passes: an example each, and what must hold of every plan whatever the model and the fleets."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections import Counter

import networkx as nx
import pytest
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plans import (
    OWNERSHIPS,
    Loader,
    Scenario,
    Sizes,
    View,
    elements,
    finished_draft,
    make_draft,
    make_plan,
    scenarios,
    spans_of,
    traces_of,
)

import rdtplan.passes
from rdtplan.errors import PlanError
from rdtplan.ir.dtypes import itemsize
from rdtplan.ir.manifest import Ints, SourceTensor, build_manifest
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import InferenceTopology, Position, TransferSettings
from rdtplan.ir.traces import RankTrace
from rdtplan.passes import PASSES
from rdtplan.passes.bound_lifetimes import bound_lifetimes
from rdtplan.passes.classify_owners import classify_owners
from rdtplan.passes.connect_streams import connect_streams
from rdtplan.passes.cut_slices import cut_slices
from rdtplan.passes.draft import Draft, ProgramDraft
from rdtplan.passes.forecast_memory import slot_nbytes
from rdtplan.passes.group_names import group_key, group_names
from rdtplan.passes.number_sequences import sequence
from rdtplan.passes.pack_chunks import layout, pack_chunks, partition
from rdtplan.passes.route_chunks import producer_index
from rdtplan.passes.time_free_signals import time_free_signals

FEW = settings(max_examples=60)


def run_until(draft: Draft, last: object) -> Draft:
    """The draft after every pass up to and with `last`."""
    for step in PASSES:
        draft = step(draft)
        if step is last:
            return draft
    raise AssertionError(f"{last} is no pass")


def named_draft(names: str, owners: list[Ints] | None = None, ranks: int = 1) -> Draft:
    """A draft over one-element bfloat16 tensors, with a trace that loads every one into a module of its
    own.
    """
    manifest = build_manifest(SourceTensor(n, "bfloat16", (1,)) for n in names.split())
    out = Loader(manifest)
    for k, name in enumerate(manifest.names):
        p = out.parameter(f"module_of.{name}", "weight", (1,))
        out.copy(k, View.full((1,)), p, View.full((1,)))
    return Draft(
        manifest=manifest,
        owners=tuple(owners or [tuple(range(ranks))] * len(manifest)),
        trainer_ranks=ranks,
        topology=InferenceTopology(),
        settings=TransferSettings(),
        programs=(ProgramDraft(out.trace(Position(0, 0, 0))),),
        program_of=(0,),
    )


@pytest.mark.parametrize("module", [m.name for m in pkgutil.iter_modules(rdtplan.passes.__path__)])
def test_docstring_examples(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"rdtplan.passes.{module}")).failed == 0


# -- groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model.layers.3.mlp.experts.7.w1", ("model.layers", 3)),
        ("model.layers.12.norm.weight", ("model.layers", 12)),
        ("transformer.h.2.attn.c_attn.weight", ("transformer.h", 2)),
        ("visual.blocks.5.attn.qkv.weight", ("visual.blocks", 5)),
        ("lm_head.weight", None),
        ("model.layer_norm2.weight", None),
    ],
)
def test_group_key(name: str, key: tuple[str, int] | None) -> None:
    assert group_key(name) == key


def test_groups_are_runs_of_layers_and_of_unindexed_names() -> None:
    draft = group_names(named_draft("embed.w embed.b h.0.a h.0.e.5.b h.1.a norm.w head.w v.0.a"))
    assert [(g.label, g.first, g.count, g.nbytes) for g in draft.groups] == [
        ("embed.w", 0, 2, 4),
        ("h.0", 2, 2, 4),
        ("h.1", 4, 1, 2),
        ("norm.w", 5, 2, 4),
        ("v.0", 7, 1, 2),
    ]
    assert draft.group_of == (0, 0, 1, 1, 2, 3, 3, 4)
    assert draft.notes == ()


def test_layers_that_are_apart_are_brought_together_with_a_note() -> None:
    before = named_draft("h.1.a h.0.a norm.w h.1.b h.0.b head.w", [(k,) for k in range(6)], 6)
    draft = group_names(before)
    assert draft.manifest.names == ("h.1.a", "h.1.b", "h.0.a", "h.0.b", "norm.w", "head.w")
    assert [g.label for g in draft.groups] == ["h.1", "h.0", "norm.w"]
    assert draft.owners == ((0,), (3,), (1,), (4,), (2,), (5,))
    (note,) = draft.notes
    assert "h.1.b and 1 more" in note and "plan order" in note
    parameters = draft.programs[0].trace.parameters.names
    sources = [draft.manifest.names[k] for k in draft.programs[0].trace.fetches.sources]
    assert [f"module_of.{s}.weight" for s in sources] == list(parameters)


@FEW
@given(st.permutations(["e.w", "h.0.a", "h.0.b", "h.1.a", "h.1.b", "h.2.a", "n.w", "o.w"]))
def test_any_manifest_order_is_grouped(names: list[str]) -> None:
    draft = group_names(named_draft(" ".join(names)))
    assert sorted(draft.manifest.names) == sorted(names)
    keys = [group_key(n) for n in draft.manifest.names]
    runs = [keys[g.first : g.first + g.count] for g in draft.groups]
    assert [k for r in runs for k in r] == keys and all(len(set(r)) == 1 for r in runs)
    indexed = [r[0] for r in runs if r[0] is not None]
    assert len(indexed) == len(set(indexed)) == 3
    assert indexed == list(dict.fromkeys(k for k in map(group_key, names) if k))
    assert bool(draft.notes) == (draft.manifest.names != tuple(names))


# -- owners --------------------------------------------------------------------------------------------------


def test_owner_classes_are_numbered_by_first_appearance() -> None:
    draft = classify_owners(named_draft("a b c d", [(0, 1), (0, 1), (2,), (0, 1)], 3))
    assert draft.ownership is not None
    assert draft.ownership.classes == ((0, 1), (2,))
    assert draft.ownership.class_of == (0, 0, 1, 0)


@pytest.mark.parametrize(
    ("owners", "code", "words"),
    [
        ([(0,), ()], "RDT301", "no trainer rank owns 'b'"),
        ([(0,), (0, 2)], "RDT302", r"'b' is owned by ranks \[0, 2\], but the trainer has ranks 0 to 1"),
        ([(0,), (-1, 0)], "RDT302", "'b' is owned by ranks"),
    ],
)
def test_impossible_owners_are_refused(owners: list[Ints], code: str, words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        classify_owners(named_draft("a b", owners, 2))
    assert caught.value.code == code


# -- cut and pack --------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 70), max_size=12))
def test_layout_is_aligned_apart_and_tight(sizes: list[int]) -> None:
    offsets, nbytes = layout(sizes)
    assert all(o % 16 == 0 for o in offsets)
    ends = [o + n for o, n in zip(offsets, sizes, strict=True)]
    assert all(end <= start < end + 16 for end, start in zip(ends, offsets[1:], strict=False))
    assert nbytes == (ends[-1] if ends else 0)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(0, 300))
def test_partition_keeps_order_and_limit(sizes: list[int], limit: int) -> None:
    ends = partition(sizes, limit)
    assert ends == sorted(set(ends)) and ends[-1] == len(sizes)
    for part in spans_of(tuple(ends)):
        assert not limit or layout([sizes[k] for k in part])[1] <= limit or len(part) == 1


def test_partition_deals_equal_sizes_evenly() -> None:
    assert partition([32] * 10, 160) == [5, 10]
    assert partition([32] * 9, 128) == [3, 6, 9]
    assert partition([32] * 10, 0) == [10]


def test_a_vocabulary_matrix_is_cut_by_rows() -> None:
    """20 MiB in chunks of 8 MiB: three keys of whole rows, as the docstring has it."""
    draft = make_draft(Scenario(sizes=Sizes(layers=1, vocab=5000, vocab_padding=1, hidden=2048)))
    limited = evolve(draft, settings=evolve(draft.settings, max_chunk_bytes=8 << 20))
    trace = cut_slices(limited).programs[0].trace
    embed = [k for k, s in enumerate(trace.fetches.sources) if s == 0]
    cut = [trace.regions[trace.fetches.source_regions[k]] for k in embed]
    assert [r.numel // 2048 for r in cut] == [1666, 1667, 1667]
    assert all(r.offset % 2048 == 0 and r.numel % 2048 == 0 and r.shape == (r.numel,) for r in cut)
    assert [trace.regions[trace.fetches.dest_regions[k]] for k in embed] == cut
    assert cut_slices(draft) is draft


def test_a_limit_below_one_element_gives_single_elements() -> None:
    """What cannot be cut is a chunk of its own, above the limit: one element."""
    s = Scenario(sizes=Sizes(1, 1, 2, 1, 1, 1, 1, 1, 3, 1), settings=TransferSettings(max_chunk_bytes=1))
    program = make_plan(s).consumers[0].program
    assert set(program.chunks.nbytes) == {2} and len(program.keys) == len(program.chunks)


def test_keys_are_deduplicated_in_record_order() -> None:
    """One slice that goes to two parameters is fetched once; its second use is a second scatter."""
    manifest = build_manifest([SourceTensor(n, "bfloat16", (6,)) for n in ("a", "b")])
    out = Loader(manifest)
    for name, source in (("p", 1), ("q", 0), ("r", 1)):
        p = out.parameter("m", name, (6,))
        out.copy(source, View.full((6,)), p, View.full((6,)))
    draft = evolve(named_draft("a b"), manifest=manifest, programs=(ProgramDraft(out.trace(Position(0, 0, 0))),))
    program = run_until(draft, pack_chunks).programs[0]
    assert program.keys is not None and program.scatters is not None and program.chunks is not None
    assert program.keys.source == (1, 0)
    assert program.keys.offset == (0, 16)
    assert program.scatters.key == (0, 1, 0)
    assert program.scatters.parameter == (0, 1, 2)
    assert program.chunks.nbytes == (28,)


# -- streams, lifetimes, free signals ------------------------------------------------------------------------


def test_a_pipeline_trainer_has_one_stream_a_stage() -> None:
    draft = named_draft("h.0.a h.1.a h.2.a h.3.a", [(2, 3), (2, 3), (0, 1), (0, 1)], 4)
    draft = run_until(draft, connect_streams)
    assert draft.component_of == (0, 0, 1, 1)
    assert draft.programs[0].chunks is not None
    assert draft.programs[0].chunks.stream == (0, 0, 1, 1)


def test_a_rank_of_two_layers_joins_their_streams() -> None:
    draft = named_draft("h.0.a h.1.a h.1.b h.2.a", [(0,), (0,), (1,), (2,)], 3)
    assert run_until(draft, connect_streams).component_of == (0, 0, 1)


def straddling_draft() -> Draft:
    """One module that takes a weight from each of two layers."""
    draft = named_draft("h.0.a h.1.a", [(0,), (1,)], 2)
    trace = draft.programs[0].trace
    one_module = evolve(trace.parameters, modules=(0, 0), module_names=("shared",))
    return evolve(draft, programs=(ProgramDraft(evolve(trace, parameters=one_module)),))


def test_a_module_in_two_streams_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        run_until(straddling_draft(), connect_streams)
    assert caught.value.code == "RDT303"
    for word in ("'shared'", "'h.0' (stream 0)", "'h.1' (stream 1)"):
        assert word in caught.value.message


def test_a_module_in_two_groups_of_one_stream_lives_from_first_to_last() -> None:
    draft = evolve(straddling_draft(), owners=((0, 1), (1,)))
    program = run_until(draft, bound_lifetimes).programs[0]
    assert program.lifetimes is not None
    assert (program.lifetimes.first, program.lifetimes.last) == ((0,), (1,))


def test_a_group_that_is_not_pulled_is_freed_at_sync_start() -> None:
    draft = named_draft("h.0.a h.1.a h.2.a")
    trace = draft.programs[0].trace
    kept = [0, 2]
    f = trace.fetches
    fewer = evolve(
        f,
        **{
            name: tuple(getattr(f, name)[k] for k in kept)
            for name in (
                "sources",
                "dtypes",
                "source_regions",
                "parameters",
                "dest_regions",
                "loaders",
                "chains",
            )
        },
    )
    draft = evolve(draft, programs=(ProgramDraft(evolve(trace, fetches=fewer)),))
    assert run_until(draft, time_free_signals).programs[0].free_after == (0, -1, 1)


# -- routing, sequences, memory ------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 100))
def test_the_carve_is_that_of_the_specification(workers: int, owners: int, group: int) -> None:
    blocks = []
    for c in range(workers):
        if owners >= workers:
            block = list(range(c * owners // workers, (c + 1) * owners // workers))
        else:
            block = [c * owners // workers]
        assert producer_index(c, workers, owners, group) == block[group % len(block)]
        assert {producer_index(c, workers, owners, g) for g in range(owners)} == set(block)
        blocks.append(block)
    assert {o for b in blocks for o in b} == set(range(owners))
    load = Counter(o for b in blocks for o in b)
    assert max(load.values()) - min(load.values()) <= 1


def test_sequence_counts_each_producer() -> None:
    assert sequence((0, 1, 0, 0, 1)) == (0, 0, 1, 2, 1)
    assert sequence(()) == ()


def test_slots_are_rounded_to_256_mib() -> None:
    mib = 1 << 20
    assert slot_nbytes(1, 0.0) == 256 * mib
    assert slot_nbytes(256 * mib, 0.0) == 256 * mib
    assert slot_nbytes(256 * mib + 1, 0.0) == 512 * mib
    assert slot_nbytes(1, 0.5) == 512 * mib
    assert slot_nbytes(1, 0.6) == 768 * mib
    assert slot_nbytes(0, 0.0) == 256 * mib


# -- every plan ----------------------------------------------------------------------------------------------


def names_of(trace: RankTrace, draft_or_plan: Draft | FleetPlan) -> dict[str, set[tuple[str, int, int]]]:
    """Parameter -> {(source name, source element, destination element)} of a trace, element for element."""
    manifest = draft_or_plan.manifest
    found: dict[str, set[tuple[str, int, int]]] = {}
    f = trace.fetches
    for source, a, parameter, b in zip(f.sources, f.source_regions, f.parameters, f.dest_regions, strict=True):
        pairs = zip(elements(trace.regions[a]), elements(trace.regions[b]), strict=True)
        at = found.setdefault(trace.parameters.names[parameter], set())
        at.update((manifest.names[source], x, y) for x, y in pairs)
    return found


def check_moves(s: Scenario, plan: FleetPlan) -> None:
    """What every worker ends with is what its loaders wrote, element for element: pulled bytes, unpacked."""
    _, trace_of, loaders = traces_of(s)
    for consumer in plan.consumers:
        loader = loaders[trace_of[consumer.consumer_id % s.topology.workers_per_replica]]
        wanted = {
            (loader.names[w.parameter], y): (loader.manifest.names[w.source], x)
            for w in loader.writes
            for x, y in zip(elements(w.source_view), elements(w.dest_view), strict=True)
        }
        program = consumer.program
        found: dict[tuple[str, int], tuple[str, int]] = {}
        keys, scatters, chunks = program.keys, program.scatters, program.chunks
        for of_keys, of_scatters, nbytes in zip(
            spans_of(chunks.key_end), spans_of(chunks.scatter_end), chunks.nbytes, strict=True
        ):
            packed: dict[int, tuple[str, int]] = {}
            reach = 0
            for k in of_keys:
                size = itemsize(program.dtype_table[keys.dtype[k]])
                name = plan.manifest.names[keys.source[k]]
                assert program.dtype_table[keys.dtype[k]] == plan.manifest.dtype(keys.source[k])
                assert keys.offset[k] % 16 == 0
                for i, element in enumerate(elements(program.regions[keys.region[k]])):
                    at = keys.offset[k] + i * size
                    assert not any(at + b in packed for b in range(size)) and at + size <= nbytes
                    packed[at] = (name, element)
                    reach = at + size
            assert reach == nbytes
            for j in of_scatters:
                k = scatters.key[j]
                assert k in of_keys
                size = itemsize(program.dtype_table[keys.dtype[k]])
                for i, element in enumerate(elements(program.regions[scatters.region[j]])):
                    place = (program.parameters.names[scatters.parameter[j]], element)
                    assert place not in found
                    found[place] = packed[keys.offset[k] + i * size]
        assert found == wanted


def check_limits(plan: FleetPlan) -> None:
    """No chunk is above the limit; one element (2 or 4 bytes) always fits the limits tried here."""
    limit = plan.settings.max_chunk_bytes
    for consumer in plan.consumers:
        assert not limit or all(n <= limit for n in consumer.program.chunks.nbytes)


def check_producers(s: Scenario, plan: FleetPlan) -> None:
    """Each chunk has one producer that owns all its names: the one of the specified carve, in every
    replica.
    """
    width = s.topology.workers_per_replica
    for consumer in plan.consumers:
        program, routing = consumer.program, consumer.routing
        worker = consumer.consumer_id % width
        for of_keys, group, producer in zip(
            spans_of(program.chunks.key_end), program.chunks.group, routing.producer, strict=True
        ):
            owner_sets = {plan.ownership.owners(program.keys.source[k]) for k in of_keys}
            (owners,) = owner_sets
            if len(owners) >= width:
                block = owners[worker * len(owners) // width : (worker + 1) * len(owners) // width]
            else:
                block = (owners[worker * len(owners) // width],)
            assert producer == block[group % len(block)] and producer in owners
        assert routing == plan.consumers[worker].routing
        assert program == plan.consumers[worker].program
        seen: Counter[int] = Counter()
        for producer, seq in zip(routing.producer, routing.seq, strict=True):
            assert seq == seen[producer]
            seen[producer] += 1


def check_streams(plan: FleetPlan) -> None:
    """Streams partition the chunks, share no producer, and are as many as can be told apart."""
    graph: nx.Graph[int] = nx.Graph()
    for k, _ in enumerate(plan.manifest.names):
        group = next(i for i, g in enumerate(plan.groups) if g.first <= k < g.first + g.count)
        for rank in plan.ownership.owners(k):
            graph.add_edge(f"group {group}", rank)
    parts = list(nx.connected_components(graph))
    stream_of_part: dict[int, int] = {}
    for consumer in plan.consumers:
        chunks = consumer.program.chunks
        for stream, producer, group in zip(chunks.stream, consumer.routing.producer, chunks.group, strict=True):
            part = next(i for i, p in enumerate(parts) if producer in p)
            assert f"group {group}" in parts[part]
            assert stream_of_part.setdefault(part, stream) == stream
    assert len(set(stream_of_part.values())) == len(stream_of_part)


def check_signals(plan: FleetPlan) -> None:
    """Every consumer signals every group once to every owner, never before the group's last chunk."""
    signals: Counter[tuple[int, int]] = Counter()
    for consumer in plan.consumers:
        program = consumer.program
        pending = Counter(program.chunks.group)
        for step in range(-1, len(program.chunks)):
            if step >= 0:
                pending[program.chunks.group[step]] -= 1
            for group, after in enumerate(program.free_after):
                if after == step:
                    assert pending[group] == 0
                    assert (step == -1) == (group not in program.chunks.group)
                    g = plan.groups[group]
                    for rank in {r for k in range(g.first, g.first + g.count) for r in plan.ownership.owners(k)}:
                        signals[rank, group] += 1
    wanted = {(p.rank, group): count for p in plan.producers for group, count in zip(p.groups, p.signals, strict=True)}
    assert signals == wanted
    assert set(wanted.values()) == {len(plan.consumers)}


def check_lifetimes(plan: FleetPlan) -> None:
    for consumer in plan.consumers:
        program = consumer.program
        touched: dict[int, list[int]] = {}
        for chunk, of_scatters in enumerate(spans_of(program.chunks.scatter_end)):
            for j in of_scatters:
                touched.setdefault(program.parameters.modules[program.scatters.parameter[j]], []).append(chunk)
        for parameter in program.fills.parameters:  # a module that only constants reach
            if len(program.chunks):
                touched.setdefault(program.parameters.modules[parameter], [0])
        lives = program.lifetimes
        assert len(lives.module) == len(touched) == len(set(lives.module))
        for module, first, last in zip(lives.module, lives.first, lives.last, strict=True):
            assert (first, last) == (min(touched[module]), max(touched[module]))
        assert list(lives.first) == sorted(lives.first)


def check_memory(s: Scenario, plan: FleetPlan) -> None:
    k, memory = s.settings.num_rdt_buffers, plan.memory
    quarter = 256 << 20
    largest = max(n for c in plan.consumers for n in c.program.chunks.nbytes)
    floor = max(largest, int(s.settings.buffer_presize_gb * 2**30))
    assert memory.receive_slot_nbytes % quarter == 0
    assert 0 <= memory.receive_slot_nbytes - floor < quarter
    for consumer, pool in zip(plan.consumers, memory.receive_pool_nbytes, strict=True):
        lanes = min(s.settings.stages_in_flight, len(set(consumer.program.chunks.stream)))
        assert pool == lanes * k * memory.receive_slot_nbytes
    width = s.topology.workers_per_replica
    for rank, ring in enumerate(memory.serve_ring_nbytes):
        slots = 0
        for consumer in plan.consumers[:width]:
            chunks = consumer.program.chunks.nbytes
            mine = [n for n, p in zip(chunks, consumer.routing.producer, strict=True) if p == rank]
            slots += max(mine, default=0)
        assert ring == k * slots
    for rank, resident in enumerate(memory.resident_gather_nbytes):
        groups = [
            sum(plan.manifest.nbytes(i) for i in range(g.first, g.first + g.count) if rank in plan.ownership.owners(i))
            for g in plan.groups
        ]
        assert resident == (s.settings.gather_lookahead + 1) * max(groups)


def check_order(s: Scenario, plan: FleetPlan) -> None:
    """The plan's manifest is the input's, reordered or not; chunks come in the order in which groups are
    gathered.
    """
    given_entries = {e.name: (e.dtype, e.shape, o) for e, o in zip(s.entries, s.owners, strict=True)}
    planned = {
        n: (plan.manifest.dtype(k), plan.manifest.shape(k), plan.ownership.owners(k))
        for k, n in enumerate(plan.manifest.names)
    }
    assert planned == given_entries
    assert bool(plan.notes) == (plan.manifest.names != tuple(e.name for e in s.entries))
    for consumer in plan.consumers:
        groups = consumer.program.chunks.group
        assert list(groups) == sorted(groups)


@settings(max_examples=120)
@given(scenarios())
@example(Scenario(shuffled=True, trainer_ranks=3, ownership="pipeline+experts", seed=2))
def test_every_plan_keeps_every_promise(s: Scenario) -> None:
    plan = make_plan(s)
    check_moves(s, plan)
    check_limits(plan)
    check_producers(s, plan)
    check_streams(plan)
    check_signals(plan)
    check_lifetimes(plan)
    check_memory(s, plan)
    check_order(s, plan)


@FEW
@given(scenarios())
def test_the_order_of_the_manifest_changes_no_move(s: Scenario) -> None:
    """Loaders see names in another order and groups are numbered otherwise; the slices are the same."""
    ordered, shuffled = (finished_draft(evolve(s, shuffled=x)) for x in (False, True))
    for a, b in zip(ordered.programs, shuffled.programs, strict=True):
        assert names_of(a.trace, ordered) == names_of(b.trace, shuffled)
    nbytes = [{g.label: g.nbytes for g in d.groups if "layers" in g.label} for d in (ordered, shuffled)]
    assert nbytes[0] == nbytes[1]


@pytest.mark.parametrize("ownership", OWNERSHIPS)
def test_streams_of_each_kind_of_trainer(ownership: str) -> None:
    """FSDP and expert trainers are one stream; a pipeline has one for each stage."""
    sizes = Sizes(layers=4, dense_layers=1)
    plan = make_plan(Scenario(sizes=sizes, trainer_ranks=4, ownership=ownership, seed=1))
    if ownership != "any":
        assert plan.overview.streams == ((2,) if "pipeline" in ownership else (1,))
