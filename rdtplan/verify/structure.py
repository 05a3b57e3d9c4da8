"""Structure: a plan that was read from a file means what its tables say, whoever wrote it.

Digests prove that nothing changed since sealing; these checks prove that what was sealed is possible: indices
in range, columns of one length, slices aligned and inside their chunk, keys inside their source, producers
that own what they serve.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise, zip_longest
from typing import TypeVar

import attrs

from rdtplan.ir.digests import (
    consumer_digest,
    fleet_identity,
    geometry_digest,
    manifest_digest,
    ownership_digest,
    pair_digests,
)
from rdtplan.ir.dtypes import ITEMSIZE
from rdtplan.ir.experts import by_slot
from rdtplan.ir.manifest import Ints, Manifest
from rdtplan.ir.pieces import gathered_nbytes
from rdtplan.ir.plan import (
    ALIGNMENT,
    ConsumerPlan,
    FleetPlan,
    GatherGroup,
    MemoryForecast,
    Overview,
    ProducerPlan,
    Program,
    Routing,
    Serving,
)
from rdtplan.ir.regions import Region, canonical, refine, span
from rdtplan.ir.topology import Ownership, TransferSettings, consumer_id, positions
from rdtplan.passes.bound_lifetimes import module_lifetimes
from rdtplan.passes.connect_streams import number_streams
from rdtplan.passes.forecast_memory import slot_nbytes
from rdtplan.passes.number_sequences import sequence
from rdtplan.verify.findings import Finding
from rdtplan.verify.operations import operation_flaws

T = TypeVar("T")


class _Checks:
    """Collects findings; `that` adds one when a condition fails."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.findings: list[Finding] = []

    def that(self, condition: bool, field: str, sentence: str, code: str = "RDT330") -> bool:
        if not condition:
            self.findings.append(Finding(code, f"{self.where}.{field}: {sentence}", (field,)))
        return condition

    def lengths(self, table: attrs.AttrsInstance, field: str, *skip: str) -> None:
        columns = {a.name: len(getattr(table, a.name)) for a in attrs.fields(type(table)) if a.name not in skip}
        first = next(iter(columns.values()))
        for name, n in columns.items():
            self.that(n == first, f"{field}.{name}", f"{n} entries where the other columns have {first}")

    def indices(self, column: Ints, bound: int, field: str, low: int = 0) -> None:
        if column:
            # Where few are possible, it is quicker to find out which there are than to compare all.
            found = set(column) if 4 * bound < len(column) else column
            least, most = min(found), max(found)
            worst = least if least < low else most
            self.that(low <= worst < bound, field, f"index {worst} is outside {low} to {bound - 1}")

    def ascending(self, column: Ints, total: int, field: str) -> None:
        ends = (0, *column)
        ok = all(a < b for a, b in pairwise(ends)) and ends[-1] == total
        self.that(ok, field, f"ends must ascend to {total}")

    def digest(self, said: str, has: str, field: str, of: str) -> None:
        self.that(said == has, field, f"it says {said[:16]!r}, {of} has {has[:16]!r}")

    def equal(self, found: attrs.AttrsInstance, wanted: attrs.AttrsInstance, field: str) -> None:
        """One finding for every field of `found` that differs from `wanted`."""
        for name in (a.name for a in attrs.fields(type(found))):
            value, expected = getattr(found, name), getattr(wanted, name)
            self.that(value == expected, f"{field}.{name}", f"it says {value}, the plan has {expected}")


def _pick(table: Sequence[T], column: Iterable[int]) -> Iterable[T]:
    """`table[i]` for every i of a column."""
    return map(table.__getitem__, column)


def check_manifest(manifest: Manifest) -> list[Finding]:
    """Columns of the manifest."""
    c = _Checks("manifest")
    c.lengths(manifest, "manifest", "dtype_table", "shape_table")
    c.indices(manifest.dtypes, len(manifest.dtype_table), "dtypes")
    c.indices(manifest.shapes, len(manifest.shape_table), "shapes")
    for dtype in manifest.dtype_table:
        c.that(dtype in ITEMSIZE, "dtype_table", f"unknown dtype {dtype!r}")
    c.that(all(n >= 0 for s in manifest.shape_table for n in s), "shape_table", "a size is negative")
    c.that(len(set(manifest.names)) == len(manifest.names), "names", "a name stands twice")
    return c.findings


def _sound(shape: Ints, stride: Ints) -> bool:
    return len(shape) == len(stride) and all(n >= 0 for n in (*shape, *stride))


def check_program(program: Program, manifest: Manifest, groups: int, classes: int, where: str) -> list[Finding]:
    """Tables of one program. Later checks rely on earlier ones, so the first kind of fault ends the list."""
    c = _Checks(where)
    for name in ("keys", "scatters", "chunks", "fills", "lifetimes", "operations", "leaves"):
        c.lengths(getattr(program, name), name)
    c.lengths(program.parameters, "parameters", "module_names")
    if c.findings:
        return c.findings
    keys, scatters, chunks, fills = program.keys, program.scatters, program.chunks, program.fills
    origin = program.provenance
    known = len(origin.scatter_loader) == len(origin.scatter_chain) == len(scatters)
    c.that(known, "provenance.scatter_loader", "a scatter lacks its origin")
    c.that(len(origin.fill_loader) == len(fills), "provenance.fill_loader", "a fill lacks its origin")
    operations, leaves = program.operations, program.leaves
    known = len(origin.operation_loader) == len(operations)
    c.that(known, "provenance.operation_loader", "an operation lacks its origin")
    known = len(program.untouched_reasons) == len(program.untouched)
    c.that(known, "untouched_reasons", "a name that stays as it is lacks its reason")
    n_regions, n_parameters = len(program.regions), len(program.parameters)
    for column, bound, field in (
        (keys.source, len(manifest), "keys.source"),
        (keys.region, n_regions, "keys.region"),
        (keys.dtype, len(program.dtype_table), "keys.dtype"),
        (scatters.key, len(keys), "scatters.key"),
        (scatters.parameter, n_parameters, "scatters.parameter"),
        (scatters.region, n_regions, "scatters.region"),
        (origin.scatter_loader, len(origin.loaders), "provenance.scatter_loader"),
        (origin.scatter_chain, len(origin.chains), "provenance.scatter_chain"),
        (origin.fill_loader, len(origin.loaders), "provenance.fill_loader"),
        (fills.parameters, n_parameters, "fills.parameters"),
        (fills.regions, n_regions, "fills.regions"),
        (origin.operation_loader, len(origin.loaders), "provenance.operation_loader"),
        (operations.parameters, n_parameters, "operations.parameters"),
        (operations.regions, n_regions, "operations.regions"),
        (operations.expressions, len(program.expressions), "operations.expressions"),
        (leaves.rows, n_parameters, "leaves.rows"),
        (leaves.regions, n_regions, "leaves.regions"),
        (chunks.group, groups, "chunks.group"),
        (chunks.owner_class, classes, "chunks.owner_class"),
        (program.parameters.modules, len(program.parameters.module_names), "parameters.modules"),
        (program.lifetimes.module, len(program.parameters.module_names), "lifetimes.module"),
        (program.lifetimes.first, len(chunks), "lifetimes.first"),
        (program.lifetimes.last, len(chunks), "lifetimes.last"),
    ):
        c.indices(column, bound, field)
    c.indices(program.free_after, len(chunks), "free_after", low=-1)
    c.that(
        len(program.free_after) == groups,
        "free_after",
        f"{len(program.free_after)} entries for {groups} groups",
    )
    c.ascending(chunks.key_end, len(keys), "chunks.key_end")
    c.ascending(chunks.scatter_end, len(scatters), "chunks.scatter_end")
    for dtype in (*program.dtype_table, *program.parameters.dtypes):
        c.that(dtype in ITEMSIZE, "dtype_table", f"unknown dtype {dtype!r}")
    for i, r in enumerate(program.regions):
        if not _sound(r.shape, r.stride) or r.offset < 0 or canonical(r.shape, r.stride, r.offset) != r:
            c.that(False, f"regions[{i}]", f"{r} is no region in canonical form")
    p = program.parameters
    for i, name in enumerate(p.names):
        if not _sound(p.shapes[i], p.strides[i]):
            c.that(False, f"parameters.strides[{i}]", f"{name!r} has shape {p.shapes[i]}, stride {p.strides[i]}")
        if p.kinds[i] not in ("parameter", "buffer", "operand"):
            c.that(False, f"parameters.kinds[{i}]", f"{name!r} is a {p.kinds[i]!r}")
        if name.rpartition(".")[0] not in p.module_names[p.modules[i] :][:1]:
            c.that(False, f"parameters.modules[{i}]", f"{name!r} is not of module {p.modules[i]}")
    c.that(len(set(p.names)) == len(p), "parameters.names", "a name stands twice")
    ends = (0, *operations.leaf_end)
    ok = all(a <= b for a, b in pairwise(ends)) and ends[-1] == len(leaves)
    c.that(ok, "operations.leaf_end", f"ends must ascend to {len(leaves)}")
    c.that(set(fills.before) <= {0, 1}, "fills.before", "expected 0 or 1")
    everywhere = len(set(scatters.key)) == len(keys)  # of indices that are in range
    c.that(everywhere, "scatters.key", "a key is fetched and goes nowhere")
    if c.findings:
        return c.findings
    spans = [span(r)[1] if r.numel else 0 for r in program.regions]
    _check_layout(c, program, manifest, spans)
    _check_destinations_inside(c, program, spans)
    _check_experts(c, program)
    for field, sentence, code in operation_flaws(program):
        c.that(False, field, sentence, code)
    c.digest(program.geometry_digest, geometry_digest(program.parameters), "geometry_digest", "the parameters")
    return c.findings


def _check_experts(c: _Checks, program: Program) -> None:
    """The table of experts: layers, slots, and parameters that have them."""
    e, p = program.experts, program.parameters
    if not (
        c.that(len(e.modules) == len(e.logical) == len(e.slot_end), "experts.modules", "a layer lacks its slots")
        and c.that(len(e.initial) == len(e.experts), "experts.initial", "a slot lacks its first expert")
        and c.that(len(e.parameters) == len(e.layers) == len(e.first), "experts.parameters", "one lacks its layer")
    ):
        return
    c.ascending(e.slot_end, len(e.experts), "experts.slot_end")
    c.indices(e.parameters, p.held, "experts.parameters")
    c.indices(e.layers, len(e.modules), "experts.layers")
    if c.findings or not e.modules:
        return
    c.that(len(set(e.modules)) == len(e.modules), "experts.modules", "a layer stands twice")
    for layer, (module, row) in enumerate(e.rows().items()):
        what = f"layer {module!r} must hold each of its experts, 0 to {e.logical[layer] - 1}, and no other"
        c.that(set(row) == set(range(e.logical[layer])), "experts.experts", what)
    for k, layer, first in zip(e.parameters, e.layers, e.first, strict=True):
        name, shape, stride = p.names[k], p.shapes[k], p.strides[k]
        slots = len(e.placed(layer))
        ours = p.module_names[p.modules[k]] == e.modules[layer]
        c.that(ours, "experts.layers", f"{name!r} is not of layer {e.modules[layer]!r}")
        apart = bool(shape) and 1 + sum((n - 1) * s for n, s in zip(shape[1:], stride[1:], strict=True)) <= stride[0]
        fits = apart and first >= 0 and first + shape[0] <= slots
        c.that(fits, "experts.first", f"{name!r} of shape {shape} cannot have {slots} slots from slot {first} on")
    if c.findings:
        return
    size = {row: p.strides[row][0] for row in e.parameters}
    for key, parameter, dest in zip(
        program.scatters.key, program.scatters.parameter, program.scatters.region, strict=True
    ):
        if parameter in size:
            try:
                list(by_slot(program.regions[program.keys.region[key]], program.regions[dest], size[parameter]))
            except ValueError as error:
                c.that(False, "scatters.region", f"a copy into {p.names[parameter]!r} is of no slot: {error}")


def _check_layout(c: _Checks, program: Program, manifest: Manifest, spans: list[int]) -> None:
    """Every slice lies in its source tensor and at a place of its own in its chunk; every scatter is of its chunk."""
    keys, chunks = program.keys, program.chunks
    held = tuple(_pick(manifest.nbytes_column, keys.source))
    sizes = [ITEMSIZE[d] for d in program.dtype_table]
    numels = [r.numel for r in program.regions]
    sound: set[object] = set()
    start = start_scatter = 0
    for chunk, end in enumerate(chunks.key_end):
        rows = held[start:end], keys.region[start:end], keys.dtype[start:end], keys.offset[start:end]
        layout = rows, chunks.nbytes[chunk]
        if layout not in sound:  # layers repeat: what fits once fits again
            sound.add(layout)
            reach = 0
            for k, (nbytes, region, dtype, offset) in enumerate(zip(*rows, strict=True), start):
                size, name = sizes[dtype], manifest.names[keys.source[k]]
                end_byte = spans[region] * size
                what = f"{offset} overlaps the slice before it or is not {ALIGNMENT}-aligned"
                c.that(offset >= reach and offset % ALIGNMENT == 0, f"keys.offset[{k}]", what)
                what = f"the slice leaves {name!r}: it ends at byte {end_byte:,} of {nbytes:,}"
                c.that(end_byte <= nbytes, f"keys.region[{k}]", what, "RDT314")
                what = f"{name!r} has {nbytes:,} bytes, no whole number of elements"
                c.that(nbytes % size == 0, f"keys.dtype[{k}]", what)
                if c.findings:
                    return
                reach = offset + numels[region] * size
            what = f"its slices end at byte {reach:,}, it is {chunks.nbytes[chunk]:,} long"
            c.that(reach == chunks.nbytes[chunk], f"chunks.nbytes[{chunk}]", what)
        scattered = program.scatters.key[start_scatter : chunks.scatter_end[chunk]]
        if not start <= min(scattered) <= max(scattered) < end:
            s = next(i for i, key in enumerate(scattered) if not start <= key < end)
            c.that(False, f"scatters.key[{start_scatter + s}]", f"key {scattered[s]} is not of chunk {chunk}")
        start, start_scatter = end, chunks.scatter_end[chunk]


def _check_destinations_inside(c: _Checks, program: Program, spans: list[int]) -> None:
    """Every copy and fill lies in its parameter, and a copy has the elements that are fetched for it."""
    p = program.parameters
    shapes = zip(p.shapes, p.strides, strict=True)
    extent = {(s, t): span(Region(s, t, 0))[1] if all(s) else 0 for s, t in set(shapes)}
    extents = list(map(extent.__getitem__, zip(p.shapes, p.strides, strict=True)))
    keys, scatters, fills = program.keys, program.scatters, program.fills
    rooms, fetches = tuple(_pick(extents, scatters.parameter)), tuple(_pick(keys.region, scatters.key))
    seen: set[object] = set()
    start = 0
    for end in program.chunks.scatter_end:  # layers and experts repeat: what fits once fits again
        chunk = slice(start, end)
        columns = rooms[chunk], fetches[chunk], scatters.region[chunk]
        if columns not in seen:
            seen.add(columns)
            kinds = dict.fromkeys(zip(*columns, strict=True))
            for kind in (k for k in kinds if k not in seen):
                seen.add(kind)
                room, fetched, written = kind
                what, code = "it leaves parameter", "RDT313"
                if spans[written] <= room:
                    reason, code = _no_copy(program.regions[fetched], program.regions[written]), "RDT330"
                    if not reason:
                        continue
                    what = f"{reason}, into"
                s = start + list(zip(*columns, strict=True)).index(kind)
                c.that(False, f"scatters.region[{s}]", f"{what} {p.names[scatters.parameter[s]]!r}", code)
        start = end
    for k, (parameter, region) in enumerate(zip(fills.parameters, fills.regions, strict=True)):
        if spans[region] > extents[parameter]:
            c.that(False, f"fills.regions[{k}]", f"it leaves parameter {p.names[parameter]!r}", "RDT313")


def _no_copy(source: Region, dest: Region) -> str:
    """Why one region cannot be copied to the other, '' when it can."""
    if source.numel != dest.numel:
        return f"{source.numel} elements are fetched, {dest.numel} written"
    try:
        refine(source, dest)
    except ValueError as error:
        return str(error)
    return ""


def _pair(pair: tuple[int, str] | None) -> str:
    return "nothing" if pair is None else f"{pair[1][:16]!r} for producer {pair[0]}"


def check_routing(
    program: Program, routing: Routing, manifest: Manifest, ownership: Ownership, where: str
) -> list[Finding]:
    """Every chunk has one producer that owns its names, sequence numbers count, pair digests fit."""
    c = _Checks(where)
    chunks = program.chunks
    if not c.that(
        len(routing.producer) == len(routing.seq) == len(chunks),
        "routing",
        f"{len(routing.producer)} producers and {len(routing.seq)} sequence numbers for {len(chunks)} chunks",
    ):
        return c.findings
    for chunk, producer in enumerate(routing.producer):
        owners = ownership.classes[chunks.owner_class[chunk]]
        if producer not in owners:
            c.that(False, f"routing.producer[{chunk}]", f"rank {producer} is not among the owners {list(owners)}")
    start = 0
    for chunk, end in enumerate(chunks.key_end):
        owner_class = chunks.owner_class[chunk]
        sources = program.keys.source[start:end]
        if set(_pick(ownership.class_of, sources)) != {owner_class}:
            source = next(k for k in sources if ownership.class_of[k] != owner_class)
            what = f"{manifest.names[source]!r} is of another owner class"
            c.that(False, f"chunks.owner_class[{chunk}]", what)
        start = end
    c.that(
        routing.seq == sequence(routing.producer),
        "routing.seq",
        "it does not count the chunks of each producer",
    )
    pairs = pair_digests(manifest, program, routing.producer)
    if routing.pair_digests != pairs:
        said, has = next((a, b) for a, b in zip_longest(routing.pair_digests, pairs) if a != b)
        c.that(False, "routing.pair_digests", f"it says {_pair(said)}, what the pair exchanges has {_pair(has)}")
    return c.findings


def check_ownership(ownership: Ownership, manifest: Manifest, groups: tuple[GatherGroup, ...]) -> list[Finding]:
    """Owner classes are sets of trainer ranks, one for every name; groups are runs that hold every name."""
    c = _Checks("plan")
    o, n = ownership, len(manifest)
    c.that(len(o.class_of) == n, "ownership.class_of", f"{len(o.class_of)} entries for {n} names")
    c.indices(o.class_of, len(o.classes), "ownership.class_of")
    for i, ranks in enumerate(o.classes):
        sane = bool(ranks) and list(ranks) == sorted(set(ranks)) and ranks[0] >= 0 and ranks[-1] < o.ranks
        what = f"{list(ranks)} is no ascending set of ranks 0 to {o.ranks - 1}"
        c.that(sane, f"ownership.classes[{i}]", what)
    at = 0
    nbytes_of = manifest.nbytes_column
    for i, group in enumerate(groups):
        ok = group.first == at and 0 < group.count <= n - at
        if not c.that(ok, f"groups[{i}]", f"it begins at name {group.first}, the group before ends at {at}"):
            return c.findings
        at = group.first + group.count
        nbytes = sum(nbytes_of[group.first : at])
        c.that(group.nbytes == nbytes, f"groups[{i}].nbytes", f"it says {group.nbytes}, its names have {nbytes}")
    c.that(at == n, "groups", f"they hold {at} names, the manifest has {n}")
    return c.findings


def check_derived(
    program: Program,
    manifest: Manifest,
    ownership: Ownership,
    groups: tuple[GatherGroup, ...],
    where: str,
) -> list[Finding]:
    """Order, streams, lifetimes and free signals, computed again from the chunks of a sound program."""
    c = _Checks(where)
    chunks, lifetimes = program.chunks, program.lifetimes
    free_after = [-1] * len(groups)
    start_key = 0
    for chunk, end in enumerate(chunks.key_end):
        group = groups[chunks.group[chunk]]
        sources = program.keys.source[start_key:end]
        if not group.first <= min(sources) <= max(sources) < group.first + group.count:
            source = next(k for k in sources if not group.first <= k < group.first + group.count)
            c.that(False, f"chunks.group[{chunk}]", f"{manifest.names[source]!r} is of another group")
        free_after[chunks.group[chunk]] = chunk
        start_key = end
    places = tuple(zip(chunks.group, chunks.owner_class, strict=True))
    c.that(
        list(places) == sorted(places),
        "chunks.group",
        "chunks must stand in the order in which the trainer publishes groups, owner classes ascending",
    )
    component_of = number_streams(ownership, groups)
    c.that(
        chunks.stream == tuple(component_of[g] for g in chunks.group),
        "chunks.stream",
        "they are not the connected components of the producers",
    )
    found = tuple(zip(lifetimes.module, lifetimes.first, lifetimes.last, strict=True))
    modules = program.parameters.modules
    alone = (modules[p] for p in (*program.fills.parameters, *program.operations.parameters))
    lived = module_lifetimes(modules, program.scatters.parameter, chunks.scatter_end, alone)
    wanted = tuple(zip(*lived, strict=True))
    c.that(sorted(found) == sorted(wanted), "lifetimes", "they are not the first and last chunks of the modules")
    for module, a, b in wanted:
        if chunks.stream[a] != chunks.stream[b]:
            name = program.parameters.module_names[module]
            c.that(False, f"chunks.stream[{b}]", f"module {name!r} takes weights from two streams")
    c.that(tuple(free_after) == program.free_after, "free_after", "it is not the last chunk of each group")
    return c.findings


def check_worker(
    plan: ConsumerPlan, manifest: Manifest, ownership: Ownership, groups: tuple[GatherGroup, ...]
) -> list[Finding]:
    """All that one worker must know to be true of its own plan; `check_manifest` has passed the manifest."""
    where = f"consumers[{plan.consumer_id}]"
    return (
        check_ownership(ownership, manifest, groups)
        or check_program(plan.program, manifest, len(groups), len(ownership.classes), f"{where}.program")
        or check_derived(plan.program, manifest, ownership, groups, f"{where}.program")
        or check_routing(plan.program, plan.routing, manifest, ownership, where)
        or check_consumer_digest(plan)
    )


def check_consumer_digest(plan: ConsumerPlan) -> list[Finding]:
    """The digest of what the worker executes."""
    c = _Checks(f"consumers[{plan.consumer_id}]")
    c.digest(plan.digest, consumer_digest(plan.program, plan.routing), "digest", "what the worker executes")
    return c.findings


def check_fleet(plan: FleetPlan) -> list[Finding]:
    """Structure and digests of the whole plan."""
    manifest, ownership, groups = plan.manifest, plan.ownership, plan.groups
    findings = check_manifest(manifest) or check_ownership(ownership, manifest, groups)
    if findings:
        return findings
    c = _Checks("plan")
    _check_topology(c, plan)
    _check_settings(c, plan.settings)
    c.digest(plan.manifest_digest, manifest_digest(manifest), "manifest_digest", "the manifest")
    c.digest(plan.ownership_digest, ownership_digest(ownership), "ownership_digest", "the ownership")
    if c.findings:
        return c.findings
    seen: set[int] = set()
    for consumer in plan.consumers:
        where = f"consumers[{consumer.consumer_id}]"
        program = consumer.program
        if id(program) not in seen:
            seen.add(id(program))
            findings += (
                check_program(program, manifest, len(groups), len(ownership.classes), f"{where}.program")
                or check_derived(program, manifest, ownership, groups, f"{where}.program")
                or _check_limit(program, plan.settings.max_chunk_bytes, f"{where}.program")
            )
        if findings:
            return findings
        routed = check_routing(program, consumer.routing, manifest, ownership, where)
        findings += routed or check_consumer_digest(consumer)
    if findings:
        return findings
    c.digest(plan.identity, fleet_identity(plan), "identity", "what decides the plan")
    n, ranks = ownership.ranks, [p.rank for p in plan.producers]
    in_order = len(ranks) == n and ranks == list(range(n))
    if not c.that(in_order, "producers", f"plans of ranks {ranks} for {n} trainer ranks"):
        return findings + c.findings
    for producer in plan.producers:
        findings += check_producer(producer, plan.consumers, len(plan.consumers), manifest, ownership, groups)
    if not findings:
        c.equal(plan.memory, _memory(plan), "memory")
        c.equal(plan.overview, _overview(plan), "overview")
    return findings + c.findings


def _check_topology(c: _Checks, plan: FleetPlan) -> None:
    t = plan.topology
    sizes = (t.tensor_parallel, t.pipeline_parallel, t.data_parallel, t.replicas)
    c.that((t.redundant_experts or 0) >= 0, "topology.redundant_experts", f"{t.redundant_experts} is less than 0")
    if not c.that(all(n >= 1 for n in sizes), "topology", f"sizes {sizes} must be 1 or more"):
        return
    what = f"{len(plan.consumers)} plans for {t.workers} workers"
    if not c.that(len(plan.consumers) == t.workers, "consumers", what):
        return
    for replica in range(t.replicas):
        for position in positions(t):
            expected = (consumer_id(t, replica, position), replica, position)
            consumer = plan.consumers[expected[0]]
            found = (consumer.consumer_id, consumer.replica, consumer.position)
            what = f"it says {found}, its place says {expected}"
            c.that(found == expected, f"consumers[{expected[0]}]", what)


def _check_settings(c: _Checks, s: TransferSettings) -> None:
    c.that(s.num_rdt_buffers >= 1, "settings.num_rdt_buffers", f"{s.num_rdt_buffers} is not 1 or more")
    c.that(s.stages_in_flight >= 1, "settings.stages_in_flight", f"{s.stages_in_flight} is not 1 or more")
    c.that(s.gather_lookahead >= 0, "settings.gather_lookahead", f"{s.gather_lookahead} is negative")
    c.that(s.max_chunk_bytes >= 0, "settings.max_chunk_bytes", f"{s.max_chunk_bytes} is negative")
    presize, device = s.buffer_presize_gb, s.staging_device
    c.that(0 <= presize < math.inf, "settings.buffer_presize_gb", f"{presize} is no size")
    c.that(device in ("gpu", "host"), "settings.staging_device", f"{device!r} is not gpu or host")


def _check_limit(program: Program, limit: int, where: str) -> list[Finding]:
    """No chunk is above the limit, but for a single element that is."""
    c = _Checks(where)
    start = 0
    for chunk, (end, nbytes) in enumerate(zip(program.chunks.key_end, program.chunks.nbytes, strict=True)):
        if limit and nbytes > limit:
            alone = end - start == 1 and program.regions[program.keys.region[start]].numel == 1
            c.that(alone, f"chunks.nbytes[{chunk}]", f"{nbytes:,} is above max_chunk_bytes {limit:,}")
        start = end
    return c.findings


def check_producer(
    producer: ProducerPlan,
    consumers: Iterable[ConsumerPlan],
    signals: int,
    manifest: Manifest,
    ownership: Ownership,
    groups: tuple[GatherGroup, ...],
) -> list[Finding]:
    """A producer plan must be the plans of its `consumers`, ascending, seen from the other end.

    `signals` is the number of all consumers of the fleet.
    """
    c = _Checks(f"producers[{producer.rank}]")
    mine = {i for i, ranks in enumerate(ownership.classes) if producer.rank in ranks}
    own: dict[int, int] = {}
    for g, group in enumerate(groups):
        members = range(group.first, group.first + group.count)
        classes = set(ownership.class_of[group.first : group.first + group.count])
        if classes <= mine:
            own[g] = group.nbytes
        elif classes & mine:
            own[g] = sum(manifest.nbytes(k) for k in members if ownership.class_of[k] in mine)
    c.that(producer.groups == tuple(own), "groups", "they are not the groups this rank owns part of")
    c.that(producer.group_nbytes == tuple(own.values()), "group_nbytes", "they are not the bytes this rank owns")
    what = f"every group is freed by one signal from each of {signals} consumers"
    c.that(producer.signals == (signals,) * len(own), "signals", what)
    wanted: list[Serving] = []
    for consumer in consumers:
        chunks = tuple(k for k, rank in enumerate(consumer.routing.producer) if rank == producer.rank)
        if chunks:
            largest = max(consumer.program.chunks.nbytes[k] for k in chunks)
            wanted.append(Serving(consumer.consumer_id, chunks, largest))
    c.that(producer.servings == tuple(wanted), "servings", "they are not what consumers pull from this rank")
    return c.findings


def _memory(plan: FleetPlan) -> MemoryForecast:
    """The forecast that follows from the rest of a sound plan."""
    s = plan.settings
    slot = slot_nbytes(
        max((n for c in plan.consumers for n in c.program.chunks.nbytes), default=0), s.buffer_presize_gb
    )
    lanes = (max(1, min(s.stages_in_flight, _distinct(c.program.chunks.stream))) for c in plan.consumers)
    first_replica = plan.topology.workers_per_replica
    return MemoryForecast(
        slot,
        tuple(n * s.num_rdt_buffers * slot for n in lanes),
        tuple(
            s.num_rdt_buffers * sum(x.slot_nbytes for x in p.servings if x.consumer_id < first_replica)
            for p in plan.producers
        ),
        tuple((s.gather_lookahead + 1) * max(p.group_nbytes, default=0) for p in plan.producers),
    )


def _overview(plan: FleetPlan) -> Overview:
    """The figures that follow from the rest of a sound plan."""
    programs = [c.program for c in plan.consumers]
    pairs = [
        (rank, nbytes)
        for c in plan.consumers
        for rank, nbytes in zip(c.routing.producer, c.program.chunks.nbytes, strict=True)
    ]
    served = [0] * plan.ownership.ranks
    pulls = [0] * plan.ownership.ranks
    for rank, nbytes in pairs:
        served[rank] += nbytes
        pulls[rank] += 1
    return Overview(
        source_names=len(plan.manifest),
        manifest_nbytes=sum(g.nbytes for g in plan.groups),
        pulled_nbytes=tuple(sum(p.chunks.nbytes) for p in programs),
        pulls=tuple(len(p.chunks) for p in programs),
        scatters=tuple(len(p.scatters) for p in programs),
        streams=tuple(_distinct(p.chunks.stream) for p in programs),
        parameters=tuple(p.parameters.held for p in programs),
        served_nbytes=tuple(served),
        served_pulls=tuple(pulls),
        gathered_nbytes=gathered_nbytes(plan.manifest, plan.ownership),
    )


def _distinct(column: Iterable[int]) -> int:
    return len(set(column))
