"""Structure: a plan that was read from a file means what its tables say, whoever wrote it.

Digests prove that nothing changed since sealing; these checks prove that what was sealed is possible: indices in range,
columns of one length, slices aligned and inside their chunk, keys inside their source, producers that own what they serve.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from rdtplan.errors import RdtError
from rdtplan.ir.digests import geometry_digest, manifest_digest, ownership_digest, pair_digests
from rdtplan.ir.dtypes import ITEMSIZE
from rdtplan.ir.manifest import Ints, Manifest
from rdtplan.ir.plan import ALIGNMENT, ConsumerPlan, FleetPlan, GatherGroup, Program, Routing
from rdtplan.ir.regions import Region, span
from rdtplan.ir.topology import Ownership, TransferSettings, consumer_id, positions
from rdtplan.passes.number_sequences import sequence
from rdtplan.verify.findings import Finding


class _Checks:
    """Collects findings; `that` adds one when a condition fails."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.findings: list[Finding] = []

    def that(self, condition: bool, field: str, sentence: str, code: str = "RDT330") -> bool:
        if not condition:
            self.findings.append(Finding(code, f"{self.where}.{field}: {sentence}", (field,)))
        return condition

    def lengths(self, table: object, field: str, *skip: str) -> None:
        columns = {a.name: len(getattr(table, a.name)) for a in attrs.fields(type(table)) if a.name not in skip}
        first = next(iter(columns.values()))
        for name, n in columns.items():
            self.that(n == first, f"{field}.{name}", f"{n} entries where the other columns have {first}")

    def indices(self, column: Ints, bound: int, field: str, low: int = 0) -> None:
        if column:
            worst = min(column) if min(column) < low else max(column)
            self.that(low <= worst < bound, field, f"index {worst} is outside {low} to {bound - 1}")

    def ascending(self, column: Ints, total: int, field: str) -> None:
        ok = all(a <= b for a, b in zip((0, *column), column, strict=False)) and (not column or column[-1] == total)
        self.that(ok, field, f"ends must ascend to {total}")


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


def check_program(program: Program, manifest: Manifest, groups: int, classes: int, where: str) -> list[Finding]:
    """Tables of one program. Later checks rely on earlier ones, so the first kind of fault ends the list."""
    c = _Checks(where)
    for name in ("keys", "scatters", "chunks", "fills", "lifetimes"):
        c.lengths(getattr(program, name), name)
    c.lengths(program.parameters, "parameters", "module_names")
    if c.findings:
        return c.findings
    keys, scatters, chunks, fills = program.keys, program.scatters, program.chunks, program.fills
    n_regions, n_parameters = len(program.regions), len(program.parameters)
    for column, bound, field in (
        (keys.source, len(manifest), "keys.source"),
        (keys.region, n_regions, "keys.region"),
        (keys.dtype, len(program.dtype_table), "keys.dtype"),
        (scatters.key, len(keys), "scatters.key"),
        (scatters.parameter, n_parameters, "scatters.parameter"),
        (scatters.region, n_regions, "scatters.region"),
        (scatters.loader, len(program.loaders), "scatters.loader"),
        (scatters.chain, len(program.chains), "scatters.chain"),
        (fills.parameters, n_parameters, "fills.parameters"),
        (fills.regions, n_regions, "fills.regions"),
        (fills.loaders, len(program.loaders), "fills.loaders"),
        (chunks.group, groups, "chunks.group"),
        (chunks.owner_class, classes, "chunks.owner_class"),
        (program.parameters.modules, len(program.parameters.module_names), "parameters.modules"),
        (program.lifetimes.module, len(program.parameters.module_names), "lifetimes.module"),
        (program.lifetimes.first, len(chunks), "lifetimes.first"),
        (program.lifetimes.last, len(chunks), "lifetimes.last"),
    ):
        c.indices(column, bound, field)
    c.indices(program.free_after, len(chunks), "free_after", low=-1)
    c.that(len(program.free_after) == groups, "free_after", f"{len(program.free_after)} entries for {groups} groups")
    c.ascending(chunks.key_end, len(keys), "chunks.key_end")
    c.ascending(chunks.scatter_end, len(scatters), "chunks.scatter_end")
    for dtype in (*program.dtype_table, *program.parameters.dtypes):
        c.that(dtype in ITEMSIZE, "dtype_table", f"unknown dtype {dtype!r}")
    for i, r in enumerate(program.regions):
        sane = len(r.shape) == len(r.stride) and r.offset >= 0 and all(n >= 0 for n in (*r.shape, *r.stride))
        c.that(sane, f"regions[{i}]", f"{r} is no region")
    if c.findings:
        return c.findings
    _check_layout(c, program, manifest)
    _check_destinations_inside(c, program)
    c.that(
        geometry_digest(program.parameters) == program.geometry_digest,
        "geometry_digest",
        "it is not the digest of the parameters",
    )
    return c.findings


def _check_layout(c: _Checks, program: Program, manifest: Manifest) -> None:
    keys, chunks = program.keys, program.chunks
    spans = [span(r)[1] if r.numel else 0 for r in program.regions]
    numels = [r.numel for r in program.regions]
    sizes = [ITEMSIZE[d] for d in program.dtype_table]
    start = start_scatter = 0
    for chunk, end in enumerate(chunks.key_end):
        reach = 0
        for k in range(start, end):
            source, region, dtype, offset = keys.source[k], keys.region[k], keys.dtype[k], keys.offset[k]
            if offset < reach or offset % ALIGNMENT:
                c.that(False, f"keys.offset[{k}]", f"{offset} overlaps the slice before it or is not {ALIGNMENT}-aligned")
            reach = offset + numels[region] * sizes[dtype]
            if spans[region] * sizes[dtype] > manifest.nbytes(source):
                c.that(
                    False,
                    f"keys.region[{k}]",
                    f"the slice leaves {manifest.names[source]!r}: it ends at byte {spans[region] * sizes[dtype]:,} of "
                    f"{manifest.nbytes(source):,}",
                    "RDT314",
                )
        c.that(
            reach == chunks.nbytes[chunk],
            f"chunks.nbytes[{chunk}]",
            f"its slices end at byte {reach:,}, it is {chunks.nbytes[chunk]:,} long",
        )
        end_scatter = chunks.scatter_end[chunk]
        for s in range(start_scatter, end_scatter):
            if not start <= program.scatters.key[s] < end:
                c.that(False, f"scatters.key[{s}]", f"key {program.scatters.key[s]} is not of chunk {chunk}")
        start, start_scatter = end, end_scatter


def _check_destinations_inside(c: _Checks, program: Program) -> None:
    p = program.parameters
    extents = [span(Region(s, t, 0))[1] if all(s) else 0 for s, t in zip(p.shapes, p.strides, strict=True)]
    spans = [span(r)[1] if r.numel else 0 for r in program.regions]
    numels = [r.numel for r in program.regions]
    keys, scatters = program.keys, program.scatters
    for s, (key, parameter, region) in enumerate(zip(scatters.key, scatters.parameter, scatters.region, strict=True)):
        if spans[region] > extents[parameter]:
            c.that(False, f"scatters.region[{s}]", f"it leaves parameter {p.names[parameter]!r}", "RDT313")
        if numels[region] != numels[keys.region[key]]:
            c.that(
                False,
                f"scatters.region[{s}]",
                f"{numels[keys.region[key]]} elements are fetched, {numels[region]} of {p.names[parameter]!r} written",
            )


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
        for source in program.keys.source[start:end]:
            if ownership.class_of[source] != owner_class:
                c.that(False, f"chunks.owner_class[{chunk}]", f"{manifest.names[source]!r} is of another owner class")
        start = end
    c.that(routing.seq == sequence(routing.producer), "routing.seq", "it does not count the chunks of each producer")
    c.that(
        routing.pair_digests == pair_digests(manifest, program, routing.producer),
        "routing.pair_digests",
        "they are not the digests of what each pair exchanges",
    )
    return c.findings


def check_worker(
    plan: ConsumerPlan, manifest: Manifest, ownership: Ownership, groups: tuple[GatherGroup, ...]
) -> list[Finding]:
    """All that one worker must know to be true of its own plan."""
    where = f"consumers[{plan.consumer_id}].program"
    findings = check_program(plan.program, manifest, len(groups), len(ownership.classes), where)
    if findings:
        return findings
    return check_routing(plan.program, plan.routing, manifest, ownership, f"consumers[{plan.consumer_id}]")


def check_fleet(plan: FleetPlan) -> list[Finding]:
    """Structure and digests of the whole plan."""
    findings = check_manifest(plan.manifest)
    c = _Checks("plan")
    _guard(c, "topology", lambda: _check_topology(c, plan))
    c.that(manifest_digest(plan.manifest) == plan.manifest_digest, "manifest_digest", "it is not the manifest's")
    c.that(ownership_digest(plan.ownership) == plan.ownership_digest, "ownership_digest", "it is not the ownership's")
    _check_ownership(c, plan)
    findings += c.findings
    if findings:
        return findings
    seen: set[int] = set()
    for consumer in plan.consumers:
        where = f"consumers[{consumer.consumer_id}]"
        if id(consumer.program) not in seen:
            seen.add(id(consumer.program))
            findings += check_program(
                consumer.program, plan.manifest, len(plan.groups), len(plan.ownership.classes), f"{where}.program"
            )
            _check_derived(c, consumer, plan, where)
        if findings or c.findings:
            return findings + c.findings
        findings += check_routing(consumer.program, consumer.routing, plan.manifest, plan.ownership, where)
    if not findings:
        _check_producers(c, plan)
    return findings + c.findings


def _guard(c: _Checks, field: str, check: Callable[[], None]) -> None:
    try:
        check()
    except RdtError as error:
        c.that(False, field, error.message)


def _check_topology(c: _Checks, plan: FleetPlan) -> None:
    t = plan.topology
    sizes = (t.tensor_parallel, t.pipeline_parallel, t.data_parallel, t.replicas)
    if not c.that(all(1 <= n <= 65536 for n in sizes), "topology", f"sizes {sizes} must be 1 or more"):
        return
    if not c.that(len(plan.consumers) == t.workers, "consumers", f"{len(plan.consumers)} plans for {t.workers} workers"):
        return
    for replica in range(t.replicas):
        for position in positions(t):
            consumer = plan.consumers[consumer_id(t, replica, position)]
            expected = (consumer_id(t, replica, position), replica, position)
            found = (consumer.consumer_id, consumer.replica, consumer.position)
            c.that(found == expected, f"consumers[{expected[0]}]", f"it says {found}, its place says {expected}")
    _check_settings(c, plan.settings)


def _check_settings(c: _Checks, s: TransferSettings) -> None:
    c.that(s.num_rdt_buffers >= 1, "settings.num_rdt_buffers", f"{s.num_rdt_buffers} is not 1 or more")
    c.that(s.stages_in_flight >= 1, "settings.stages_in_flight", f"{s.stages_in_flight} is not 1 or more")
    c.that(s.gather_lookahead >= 0, "settings.gather_lookahead", f"{s.gather_lookahead} is negative")
    c.that(s.max_chunk_bytes >= 0, "settings.max_chunk_bytes", f"{s.max_chunk_bytes} is negative")
    c.that(s.staging_device in ("gpu", "host"), "settings.staging_device", f"{s.staging_device!r} is not gpu or host")


def _check_ownership(c: _Checks, plan: FleetPlan) -> None:
    o, n = plan.ownership, len(plan.manifest)
    c.that(len(o.class_of) == n, "ownership.class_of", f"{len(o.class_of)} entries for {n} names")
    c.indices(o.class_of, len(o.classes), "ownership.class_of")
    for i, ranks in enumerate(o.classes):
        sane = bool(ranks) and list(ranks) == sorted(set(ranks)) and ranks[0] >= 0 and ranks[-1] < o.ranks
        c.that(sane, f"ownership.classes[{i}]", f"{list(ranks)} is no ascending set of ranks 0 to {o.ranks - 1}")
    at = 0
    for i, group in enumerate(plan.groups):
        ok = group.first == at and group.count > 0
        c.that(ok, f"groups[{i}]", f"it begins at name {group.first}, the group before ends at {at}")
        at = group.first + max(group.count, 0)
    c.that(at == n, "groups", f"they hold {at} names, the manifest has {n}")
    c.that(len(plan.producers) == o.ranks, "producers", f"{len(plan.producers)} plans for {o.ranks} trainer ranks")


def _check_derived(c: _Checks, consumer: ConsumerPlan, plan: FleetPlan, where: str) -> None:
    """Lifetimes, free signals and key groups, computed again from the chunks."""
    program = consumer.program
    chunks = program.chunks
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    free_after = [-1] * len(plan.groups)
    start = start_key = 0
    for chunk, end in enumerate(chunks.scatter_end):
        for parameter in program.scatters.parameter[start:end]:
            module = program.parameters.modules[parameter]
            first.setdefault(module, chunk)
            last[module] = chunk
        group = plan.groups[chunks.group[chunk]]
        for source in program.keys.source[start_key : chunks.key_end[chunk]]:
            if not group.first <= source < group.first + group.count:
                c.that(False, f"{where}.chunks.group[{chunk}]", f"{plan.manifest.names[source]!r} is of another group")
        free_after[chunks.group[chunk]] = chunk
        start, start_key = end, chunks.key_end[chunk]
    found = dict(
        zip(program.lifetimes.module, zip(program.lifetimes.first, program.lifetimes.last, strict=True), strict=True)
    )
    wanted = {m: (first[m], last[m]) for m in first}
    c.that(found == wanted, f"{where}.program.lifetimes", "they are not the first and last chunks of the modules")
    c.that(tuple(free_after) == program.free_after, f"{where}.program.free_after", "it is not the last chunk of each group")


def _check_producers(c: _Checks, plan: FleetPlan) -> None:
    """Producer plans must be the consumer plans seen from the other end."""
    serves: dict[tuple[int, int], list[int]] = {}
    for consumer in plan.consumers:
        for chunk, producer in enumerate(consumer.routing.producer):
            serves.setdefault((producer, consumer.consumer_id), []).append(chunk)
    for rank, producer in enumerate(plan.producers):
        where = f"producers[{rank}]"
        c.that(producer.rank == rank, where, f"it says rank {producer.rank}")
        owned = sorted({g for g, group in enumerate(plan.groups) if _owns(plan, rank, group)})
        c.that(list(producer.groups) == owned, f"{where}.groups", "they are not the groups this rank owns part of")
        c.that(
            producer.signals == (len(plan.consumers),) * len(owned),
            f"{where}.signals",
            f"every group is freed by one signal from each of {len(plan.consumers)} consumers",
        )
        found = {(rank, s.consumer_id): list(s.chunks) for s in producer.servings}
        wanted = {k: v for k, v in serves.items() if k[0] == rank}
        c.that(found == wanted, f"{where}.servings", "they are not the chunks that consumers pull from this rank")


def _owns(plan: FleetPlan, rank: int, group: GatherGroup) -> bool:
    members = range(group.first, group.first + group.count)
    classes = {plan.ownership.class_of[k] for k in members}
    return any(rank in plan.ownership.classes[k] for k in classes)
