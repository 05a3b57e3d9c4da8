"""`rdtplan explain`: one weight from its owners to its destination on every worker; and back, from a parameter of vLLM.

Names of one form that travel in the same way (all experts of all layers, say) are explained once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from attrs import asdict, frozen

from rdtplan.errors import InputError
from rdtplan.ir.file import PlanFile
from rdtplan.ir.manifest import Manifest
from rdtplan.ir.plan import ConsumerPlan, Program
from rdtplan.report.drill import workers_of
from rdtplan.report.names import fold_names, template
from rdtplan.report.tables import paragraph, table
from rdtplan.report.units import human_bytes, plural, ranges
from rdtplan.report.writes import WriteLine, describe, fold

SHOWN = 12
"""Forms that `explain` shows of a pattern that matches more."""


@frozen(slots=True)
class Explained:
    """One name, and how many others travel as it does."""

    direction: str
    """`source` or `parameter`."""
    name: str
    like_it: tuple[str, ...]
    """All names of this form, itself included."""
    dtype: str
    shape: tuple[int, ...]
    group: str
    """Gather group of a source, module of a parameter."""
    owners: tuple[int, ...]
    """Trainer ranks that hold a source."""
    workers: tuple[int, ...]
    """Workers on which it ends, or that have the parameter."""
    writes: tuple[WriteLine, ...]
    fills: tuple[str, ...]
    aliases: tuple[str, ...]


def explain(file: PlanFile, query: str, *, parameters: bool = False) -> list[Explained]:
    """Everything about the names that match `query`, sources first. InputError RDT108 when nothing matches.

    `parameters` looks among the model's parameters alone.
    """
    manifest, consumers = file.field("manifest"), workers_of(file)
    if not parameters:
        sources = _matching(manifest.names, query)
        if sources:
            return _explain_sources(file, manifest, consumers, sources)
    found = _explain_parameters(manifest, consumers, query)
    if found:
        return found
    every = [template(n) for n in manifest.names] + [n for c in consumers[:1] for n in c.program.parameters.names]
    close = get_close_matches(query, dict.fromkeys(every), 3, 0.5) or get_close_matches(template(query), set(every), 3)
    raise InputError(
        f"{query!r} is no source name and no parameter of the plan, nor a pattern of either",
        fix=f"names like it: {', '.join(close)}" if close else "patterns use *, as in '*.up_proj.weight'",
        code="RDT108",
    )


def _matching(names: tuple[str, ...], query: str) -> list[int]:
    if any(c in query for c in "*?["):
        return [k for k, name in enumerate(names) if fnmatchcase(name, query)]
    return [names.index(query)] if query in names else []


# -- from a source to the workers ------------------------------------------------------------------------------


def _explain_sources(
    file: PlanFile, manifest: Manifest, consumers: list[ConsumerPlan], sources: list[int]
) -> list[Explained]:
    groups, ownership = file.field("groups"), file.field("ownership")
    firsts = [g.first for g in groups]
    programs = {id(c.program): c.program for c in consumers}  # replicas share theirs
    scatters = {i: _scatters_of(program, set(sources)) for i, program in programs.items()}
    forms: dict[Any, list[int]] = {}
    for k in sources:
        routes = tuple(_signature(program, scatters[i].get(k, ())) for i, program in programs.items())
        forms.setdefault((template(manifest.names[k]), ownership.class_of[k], routes), []).append(k)
    out = []
    for members in forms.values():
        k = members[0]
        rows = [w for c in consumers for w in describe(c, manifest, scatters[id(c.program)].get(k, ()))]
        out.append(
            Explained(
                direction="source",
                name=manifest.names[k],
                like_it=tuple(manifest.names[m] for m in members),
                dtype=manifest.dtype(k),
                shape=manifest.shape(k),
                group=groups[bisect_right(firsts, k) - 1].label,
                owners=ownership.owners(k),
                workers=tuple(sorted({w.worker for w in rows})),
                writes=tuple(fold(rows)),
                fills=(),
                aliases=(),
            )
        )
    return out


def _scatters_of(program: Program, sources: set[int]) -> dict[int, list[int]]:
    """Scatters by the source they come from, for the given sources."""
    wanted = [k for k, source in enumerate(program.keys.source) if source in sources]
    at = dict.fromkeys(wanted)
    found: dict[int, list[int]] = {}
    for s, key in enumerate(program.scatters.key):
        if key in at:
            found.setdefault(program.keys.source[key], []).append(s)
    return found


def _signature(program: Program, scatters: Iterable[int]) -> Any:
    """What two names of one form must agree in to be explained together, on the workers of one program."""
    return tuple((program.keys.region[program.scatters.key[s]], program.provenance.scatter_chain[s]) for s in scatters)


# -- from a parameter to its sources ---------------------------------------------------------------------------


def _explain_parameters(manifest: Manifest, consumers: list[ConsumerPlan], query: str) -> list[Explained]:
    forms: dict[Any, list[tuple[str, list[tuple[ConsumerPlan, int]]]]] = {}
    by_name: dict[str, list[tuple[ConsumerPlan, int]]] = {}
    for c in consumers:
        for index, name in _matching_parameters(c, query):
            by_name.setdefault(name, []).append((c, index))
    for name, places in by_name.items():
        p = places[0][0].program.parameters
        shapes = tuple((c.consumer_id, c.program.parameters.shapes[i]) for c, i in places)
        key = (template(name), p.dtypes[places[0][1]], shapes)
        forms.setdefault(key, []).append((name, places))
    return [_explain_parameter(manifest, members) for members in forms.values()]


def _matching_parameters(consumer: ConsumerPlan, query: str) -> list[tuple[int, str]]:
    p = consumer.program.parameters
    hits = [(k, p.names[k]) for k in _matching(p.names, query)]
    known = {k for k, _ in hits}
    for k, aliases in enumerate(p.aliases):
        if k not in known and aliases and _matching(aliases, query):
            hits.append((k, p.names[k]))
    return hits


def _explain_parameter(manifest: Manifest, members: list[tuple[str, list[tuple[ConsumerPlan, int]]]]) -> Explained:
    name, places = members[0]
    rows, fills = [], []
    for c, index in places:
        scatters = [s for s, p in enumerate(c.program.scatters.parameter) if p == index]
        rows += describe(c, manifest, scatters)
        f = c.program.fills
        for at, value in zip(f.parameters, f.values, strict=True):
            if at == index:
                fills.append(f"worker {c.consumer_id} fills part of it with {value:g}")
    consumer, index = places[0]
    p = consumer.program.parameters
    return Explained(
        direction="parameter",
        name=name,
        like_it=tuple(n for n, _ in members),
        dtype=p.dtypes[index],
        shape=p.shapes[index],
        group=p.module_names[p.modules[index]],
        owners=(),
        workers=tuple(sorted(c.consumer_id for c, _ in places)),
        writes=tuple(fold(rows)),
        fills=tuple(fills),
        aliases=p.aliases[index],
    )


# -- text ------------------------------------------------------------------------------------------------------


def as_json(found: list[Explained]) -> list[dict[str, Any]]:
    """JSON-ready: every form, with all its names."""
    return [asdict(e) for e in found]


def render(found: list[Explained], width: int) -> list[str]:
    """The first `SHOWN` forms as lines."""
    lines: list[str] = []
    for e in found[:SHOWN]:
        lines += [*([""] if lines else []), *_render_one(e, width)]
    if len(found) > SHOWN:
        rest = sum(len(e.like_it) for e in found[SHOWN:])
        more = f"... and {plural(len(found) - SHOWN, 'form')} more ({plural(rest, 'name')}); narrow the pattern"
        lines += ["", *paragraph(more + ", or use --json", width)]
    return lines


def _render_one(e: Explained, width: int) -> list[str]:
    kind = "source" if e.direction == "source" else "parameter"
    lines = paragraph(f"{kind} {e.name}: {e.dtype} {list(e.shape)}", width, 2)
    if len(e.like_it) > 1:
        form = ", ".join(f.pattern for f in fold_names(e.like_it))
        lines += paragraph(f"  and {plural(len(e.like_it) - 1, 'name')} that travel as it does: {form}", width, 4)
    if e.direction == "source":
        lines += paragraph(f"  gathered with group {e.group}, held by trainer ranks {ranges(e.owners)}", width, 4)
    else:
        alias = f", also known as {', '.join(e.aliases)}" if e.aliases else ""
        lines += paragraph(f"  of module {e.group} on workers {ranges(e.workers)}{alias}", width, 4)
    for fill in dict.fromkeys(e.fills):
        lines += paragraph(f"  {fill}", width, 4)
    if not e.writes:
        none = "no worker takes it" if e.direction == "source" else "nothing of the trainer is written to it"
        return [*lines, *paragraph(f"  {none}", width, 4)]
    return [*lines, *_write_table(e, width), *_how(e, width)]


def _write_table(e: Explained, width: int) -> list[str]:
    rows = []
    for w in e.writes:
        source = f"{' '.join(f.pattern for f in fold_names(w.sources))} " if e.direction == "parameter" else ""
        target = f"{w.parameter} " if e.direction == "source" else ""
        row = [ranges(w.workers), ranges(w.producers), source + w.slice, target + w.destination, human_bytes(w.nbytes)]
        rows.append(row)
    heads = ["worker", "from rank", "slice", "lands in", "bytes"]
    return table("", heads, rows, width, text=(0, 1, 2, 3))


def _how(e: Explained, width: int) -> list[str]:
    letters = []
    texts = [w.slice + w.destination + w.chain for w in e.writes]
    if any(len(w.workers) > 1 and "i" in w.slice + w.destination for w in e.writes):
        letters.append("i counts the workers of a line from 0")
    if any(len(w.sources) > 1 and "j" in t for w, t in zip(e.writes, texts, strict=True)):
        letters.append("j its sources")
    lines = paragraph(f"  {', '.join(letters)}", width, 4) if letters else []
    for text in dict.fromkeys(f"  {w.chain}, by {w.loader}" for w in e.writes):
        lines += paragraph(text, width, 4)
    return lines
