"""A plan against the loaders: is it still what this vLLM would load?

A plan can be sound and wrong. Gate and up exchanged, two experts swapped, a square matrix transposed, a transform left
out: every element is written once and every source consumed. Only the loaders know better. So they are run again on
what the plan says of itself (manifest, owners, layout, settings, dtype), and every worker's program is compared with
what they do, name by name and element by element. Other chunks or routing for the same writes are a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from rdtplan.ir.digests import geometry_rows
from rdtplan.ir.manifest import Manifest, SourceTensor
from rdtplan.ir.operations import Expression
from rdtplan.ir.pieces import whole_entries
from rdtplan.ir.plan import ConsumerPlan, FleetPlan, Program
from rdtplan.ir.regions import Region, contiguous_stride
from rdtplan.report.boxes import region_text
from rdtplan.verify.findings import Finding

Taken = tuple[str, str, Region]
"""(source name, dtype in which it is read, region of the source)."""
_COLUMNS = ("name", "kind", "dtype", "shape", "stride", "aliases")


def check_loaders(plan: FleetPlan, fresh: FleetPlan) -> list[Finding]:
    """Findings about `plan`, given what the loaders do now: the first difference of every worker, named.

    `fresh` was made from the inputs of `plan` (`rdtplan.compiler.recompile`), verified or not.
    """
    findings: list[Finding] = []
    seen: set[tuple[int, int]] = set()
    for ours, theirs in zip(plan.consumers, fresh.consumers, strict=True):
        pair = (id(ours.program), id(theirs.program))
        if pair not in seen and ours.program != theirs.program:
            findings += _check_worker(ours, theirs, plan.manifest)
        seen.add(pair)
    notes = list(_remarks(plan, fresh, bool(findings)))
    return findings + notes


def _remarks(plan: FleetPlan, fresh: FleetPlan, differs: bool) -> Iterator[Finding]:
    if plan.model.config_digest != fresh.model.config_digest:
        sentence = (
            "config.json is not the one that the plan was compiled from: "
            f"digest {plan.model.config_digest[:16]} in the plan, {fresh.model.config_digest[:16]} here"
        )
        yield Finding("RDT333", sentence, ("model.config_digest",), "note")
    if not differs and [c.digest for c in plan.consumers] != [c.digest for c in fresh.consumers]:
        sentence = "the loaders write what the plan writes; this rdtplan would pack, order or route it in another way"
        yield Finding("RDT333", sentence, ("consumers",), "note")


def check_entries(plan: FleetPlan, given: Iterable[SourceTensor]) -> list[Finding]:
    """The sources that a plan was compiled from, and those that a checkpoint or trainer has; owners apart."""
    rows = {e.name: (e.dtype, e.shape) for e in given}
    findings = []
    for entry in whole_entries(plan.manifest, plan.ownership):
        found = rows.pop(entry.name, None)
        if found != (entry.dtype, entry.shape):
            said = "does not have it" if found is None else f"has {found[0]} {found[1]}"
            sentence = f"source name {entry.name!r}: the plan has {entry.dtype} {entry.shape}, the manifest {said}"
            findings.append(Finding("RDT333", sentence, (entry.name,)))
    findings += [Finding("RDT333", f"source name {name!r}: the plan does not have it", (name,)) for name in rows]
    return findings


def _check_worker(ours: ConsumerPlan, theirs: ConsumerPlan, manifest: Manifest) -> list[Finding]:
    where = f"worker {ours.consumer_id} ({ours.position})"
    a, b = ours.program, theirs.program
    return [
        Finding("RDT332", f"{where}: {sentence}", names)
        for sentence, names in (
            *_geometry(a, b),
            *_experts(a, b),
            *_copies(a, b, manifest),
            *_fills(a, b),
            *_operations(a, b),
        )
    ]


Difference = tuple[str, tuple[str, ...]]
"""(sentence, names)."""


def _geometry(a: Program, b: Program) -> Iterator[Difference]:
    planned, live = geometry_rows(a.parameters), {row[0]: row for row in geometry_rows(b.parameters)}
    for row in planned:
        other = live.pop(row[0], None)
        if other is None:
            yield f"the plan has {row[1]} {row[0]!r}, the model of this vLLM has none that is loaded", (row[0],)
            return
        for column, x, y in zip(_COLUMNS, row, other, strict=True):
            if x != y:
                yield f"{row[0]!r}: {column} {x} in the plan, {y} in the model of this vLLM", (row[0],)
                return
    for name in live:
        yield f"the model of this vLLM has {live[name][1]} {name!r}, which the plan does not know", (name,)
        return


def _experts(a: Program, b: Program) -> Iterator[Difference]:
    """The placement itself is an input; which parameters have slots, and which slots these are, the model says."""
    for column in ("modules", "logical", "slot_end", "parameters", "layers", "first"):
        x, y = getattr(a.experts, column), getattr(b.experts, column)
        if x != y:
            yield f"experts.{column}: {x} in the plan, {y} in the model of this vLLM", (f"experts.{column}",)
            return


def _copies(a: Program, b: Program, manifest: Manifest) -> Iterator[Difference]:
    """The first copy that differs, in the plan's order, and how many do."""
    planned, live = _scatters(a, manifest), _scatters(b, manifest)
    differing = [place for place in planned if planned[place] != live.get(place)]
    missing = [place for place in live if place not in planned]
    if not differing and not missing:
        return
    place = (differing or missing)[0]
    program = a if differing else b
    said, does = planned.get(place), live.get(place)
    name = place[0]
    loader = next(_loader(b, place), "") if does else ""
    parts = [
        f"{name!r} {_in_parameter(program, *place)}: ",
        f"the plan {_words(said, manifest)}, the loader {_words(does, manifest)}",
        f" ({loader})" if loader else "",
        f"; {len(differing) + len(missing)} of {len(planned)} copies differ",
    ]
    names = (name, *dict.fromkeys(taken[0] for taken in (said, does) if taken))
    yield "".join(parts), names


def _scatters(program: Program, manifest: Manifest) -> dict[tuple[str, Region], Taken]:
    keys, scatters, regions = program.keys, program.scatters, program.regions
    return {
        (program.parameters.names[p], regions[dest]): (
            manifest.names[keys.source[k]],
            program.dtype_table[keys.dtype[k]],
            regions[keys.region[k]],
        )
        for k, p, dest in zip(scatters.key, scatters.parameter, scatters.region, strict=True)
    }


def _loader(program: Program, place: tuple[str, Region]) -> Iterator[str]:
    scatters, origin = program.scatters, program.provenance
    for s, (p, dest) in enumerate(zip(scatters.parameter, scatters.region, strict=True)):
        if (program.parameters.names[p], program.regions[dest]) == place:
            yield origin.loaders[origin.scatter_loader[s]]


def _in_parameter(program: Program, name: str, region: Region) -> str:
    row = program.parameters.names.index(name)
    return region_text(region, program.parameters.shapes[row], program.parameters.strides[row])


def _words(taken: Taken | None, manifest: Manifest) -> str:
    if taken is None:
        return "copies nothing there"
    name, dtype, region = taken
    k = manifest.names.index(name)
    retyped = "" if dtype == manifest.dtype(k) else f" as {dtype}"
    shape = manifest.shape(k)
    return f"takes {name!r} {region_text(region, shape, contiguous_stride(shape))}{retyped}"


def _fills(a: Program, b: Program) -> Iterator[Difference]:
    rows = [
        [
            (p.parameters.names[row], p.regions[region], value, before)
            for row, region, value, before in zip(
                p.fills.parameters, p.fills.regions, p.fills.values, p.fills.before, strict=True
            )
        ]
        for p in (a, b)
    ]
    for (program, mine, others), said in zip(
        ((a, rows[0], set(rows[1])), (b, rows[1], set(rows[0]))), ("the plan fills", "the loader fills"), strict=True
    ):
        for name, region, value, before in mine:
            if (name, region, value, before) not in others:
                other = "the loader does not" if program is a else "the plan does not"
                when = "" if before else " after the copies"
                yield f"{said} {name!r} {_in_parameter(program, name, region)} with {value}{when}, {other}", (name,)
                return


def _operations(a: Program, b: Program) -> Iterator[Difference]:
    for x, y in zip_longest(_computed(a), _computed(b)):
        if x != y:
            name = (x or y or ("",))[0]
            said, does = (f"computes {z[0]!r} by {_steps(z[2])}" if z else "computes nothing more" for z in (x, y))
            if said == does:
                said, does = "reads or writes other elements", does
            yield f"the plan {said}, the loader {does}", (name,)
            return


def _computed(p: Program) -> Iterator[tuple[str, Region, Expression, tuple[tuple[str, Region], ...]]]:
    start = 0
    o = p.operations
    for row, region, expression, end in zip(o.parameters, o.regions, o.expressions, o.leaf_end, strict=True):
        leaves = zip(p.leaves.rows[start:end], p.leaves.regions[start:end], strict=True)
        read = tuple((p.parameters.names[leaf], p.regions[r]) for leaf, r in leaves)
        yield p.parameters.names[row], p.regions[region], p.expressions[expression], read
        start = end


def _steps(expression: Expression) -> str:
    return " ".join(_names(node.op for node in expression.nodes)) or "nothing"


def _names(ops: Iterable[str]) -> list[str]:
    return [op for op in ops if op not in ("leaf", "integer", "real")]
