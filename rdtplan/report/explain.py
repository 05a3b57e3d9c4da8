"""`rdtplan explain`: one weight from its owners to its destination on every worker; and back, from a parameter of vLLM.

Names of one form that travel in the same way (all experts of all layers, say) are explained once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from attrs import asdict, evolve, frozen

from rdtplan.errors import InputError
from rdtplan.ir.file import PlanFile
from rdtplan.ir.manifest import Ints, Manifest
from rdtplan.ir.plan import ConsumerPlan, Program
from rdtplan.ir.regions import Region
from rdtplan.ir.traces import Parameters
from rdtplan.report.drill import workers_of
from rdtplan.report.names import indices, names_text, template
from rdtplan.report.tables import paragraph, table
from rdtplan.report.units import human_bytes, numbered, plural, ranges
from rdtplan.report.writes import WriteLine, describe, fold, letters_text

SHOWN = 12
"""Forms that `explain` shows of a pattern that matches more."""


@frozen(slots=True)
class Explained:
    """One name, and how many others travel as it does."""

    direction: str
    """`source` or `parameter`."""
    name: str
    like_it: tuple[str, ...]
    """All names of this form that travel in the same way, itself included."""
    slots: bool
    """Do several of them go to one parameter, each one slot further than the one before?"""
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
    if parameters and _matching(manifest.names, query):
        raise InputError(
            f"{query!r} is a source name, not a parameter of the vLLM model",
            fix="leave --parameter out",
            code="RDT108",
        )
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
    wanted = {k: indices(manifest.names[k]) for k in sources}
    scatters = {i: _scatters_of(program, wanted.keys()) for i, program in programs.items()}
    routes: dict[int, list[Any]] = {k: [] for k in sources}
    places: dict[int, list[_Place]] = {k: [] for k in sources}
    for i in _unlike(programs):
        for k, (route, place) in _routes(programs[i], scatters[i], wanted).items():
            routes[k].append((i, route))
            places[k] += place
    forms: dict[Any, list[int]] = {}
    for k in sources:
        kind = template(manifest.names[k]), manifest.dtype(k), manifest.shape(k), ownership.class_of[k]
        forms.setdefault((*kind, tuple(routes[k])), []).append(k)
    out = []
    for members in (alike for form in forms.values() for alike in _in_step(form, wanted, places)):
        k = members[0]
        lines = fold([w for c in consumers for w in describe(c, manifest, scatters[id(c.program)].get(k, ()))])
        used = {i: [s for m in members for s in found.get(m, ())] for i, found in scatters.items()}
        out.append(
            Explained(
                direction="source",
                name=manifest.names[k],
                like_it=tuple(manifest.names[m] for m in members),
                slots=len({_parameters_of(places[m]) for m in members}) < len(members) and bool(places[k]),
                dtype=manifest.dtype(k),
                shape=manifest.shape(k),
                group=groups[bisect_right(firsts, k) - 1].label,
                owners=ownership.owners(k),
                workers=tuple(sorted({n for w in lines for n in w.workers})),
                writes=_from_all(lines, consumers, used),
                fills=(),
                aliases=(),
            )
        )
    return out


def _scatters_of(program: Program, sources: Collection[int]) -> dict[int, list[int]]:
    """Scatters by the source they come from, for the given sources."""
    found: dict[int, list[int]] = {}
    for s, source in enumerate(map(program.keys.source.__getitem__, program.scatters.key)):
        if source in sources:
            found.setdefault(source, []).append(s)
    return found


def _unlike(programs: dict[int, Program]) -> list[int]:
    """One program of each kind. In those of a kind, as in tensor-parallel ranks, the same names travel alike."""
    kinds: dict[Any, int] = {}
    places: dict[Region, int] = {}
    for i, p in programs.items():
        place = [places.setdefault(r, len(places)) for r in p.regions]
        kind = (
            p.parameters,
            p.keys.source,
            _renumbered(p.keys.region),
            p.scatters.key,
            p.scatters.parameter,
            tuple(map(place.__getitem__, p.scatters.region)),
            _renumbered(p.provenance.scatter_chain),
            (p.fills.parameters, tuple(place[r] for r in p.fills.regions), p.fills.values),
        )
        kinds.setdefault(kind, i)
    return list(kinds.values())


def _renumbered(column: Ints) -> Ints:
    """By first appearance: equal for two programs that number what they use differently, and use it alike."""
    order = {value: i for i, value in enumerate(dict.fromkeys(column))}
    return tuple(map(order.__getitem__, column))


_Place = tuple[str, int, int]
"""Where a write begins: (parameter, its elements from one slot to the next, the offset)."""


def _routes(
    program: Program, scatters: dict[int, list[int]], wanted: dict[int, tuple[int, ...]]
) -> dict[int, tuple[Any, list[_Place]]]:
    """What names of one form must agree in to be explained together, on the workers of one program; and their places.

    They take the same slice by the same operations, and write as large a region of the same parameter, each of that of
    its own layer.
    """
    p, regions = program.parameters, program.regions
    forms = [template(name) for name in p.names]
    layers = [indices(name) for name in p.names]
    slots = [stride[0] if stride else 0 for stride in p.strides]
    sizes: dict[Any, int] = {}
    size_of = [sizes.setdefault((r.shape, r.stride), len(sizes)) for r in regions]
    key, region, parameter = program.scatters.key, program.scatters.region, program.scatters.parameter
    sliced, chain = program.keys.region, program.provenance.scatter_chain
    out = {}
    for k, mine in scatters.items():
        name = wanted[k]
        route, place = [], []
        for s in mine:
            to, at = parameter[s], region[s]
            layer = layers[to]
            own = layer == name[: len(layer)]
            route.append((sliced[key[s]], chain[s], size_of[at], forms[to], own or layer))
            place.append((p.names[to], slots[to], regions[at].offset))
        out[k] = tuple(route), place
    return out


def _parameters_of(places: list[_Place]) -> tuple[str, ...]:
    return tuple(name for name, _, _ in places)


def _in_step(
    form: list[int], names: dict[int, tuple[int, ...]], places: dict[int, list[_Place]]
) -> Iterable[list[int]]:
    """Names of one form, those together that land in the same place, or from there slot by slot in the names' order."""
    layers: dict[tuple[str, ...], list[int]] = {}
    for k in sorted(form, key=lambda k: names[k]):
        layers.setdefault(_parameters_of(places[k]), []).append(k)
    found: dict[Any, list[int]] = {}
    for members in layers.values():
        runs: list[list[int]] = []
        following: list[int] | None = None
        for k in members:
            offsets = [offset for _, _, offset in places[k]]
            if offsets == following:
                runs[-1].append(k)
            else:
                runs.append([k])
            following = [offset + slot for _, slot, offset in places[k]]
        for run in runs:
            start = tuple(offset for _, _, offset in places[run[0]])
            found.setdefault((start, len(run) > 1), []).extend(run)
    return [sorted(members, key=lambda k: names[k]) for members in found.values()]


def _from_all(
    lines: list[WriteLine], consumers: list[ConsumerPlan], used: dict[int, Iterable[int]]
) -> tuple[WriteLine, ...]:
    """Lines of one name, with the trainer ranks of all names like it: `used` are their scatters, by program."""
    chunks: dict[int, set[int]] = {}
    for c in consumers:
        i, ends = id(c.program), c.program.chunks.scatter_end
        if i not in chunks:
            chunks[i] = {bisect_right(ends, s) for s in used[i]}
    ranks = {c.consumer_id: {c.routing.producer[k] for k in chunks[id(c.program)]} for c in consumers}
    return tuple(evolve(x, producers=tuple(sorted({r for w in x.workers for r in ranks[w]}))) for x in lines)


# -- from a parameter to its sources ---------------------------------------------------------------------------


def _explain_parameters(manifest: Manifest, consumers: list[ConsumerPlan], query: str) -> list[Explained]:
    programs = {id(c.program): c.program for c in consumers}
    matching = {i: _matching_parameters(program.parameters, query) for i, program in programs.items()}
    scatters = {i: _scatters_into(program, matching[i]) for i, program in programs.items()}
    signature = _Signatures(manifest)
    routes: dict[str, list[Any]] = {}
    for i in _unlike(programs):
        for index in matching[i]:
            route = i, signature(programs[i], index, scatters[i][index])
            routes.setdefault(programs[i].parameters.names[index], []).append(route)
    forms: dict[Any, list[str]] = {}
    for name, route in routes.items():
        forms.setdefault((template(name), tuple(route)), []).append(name)
    at = {i: {program.parameters.names[k]: k for k in matching[i]} for i, program in programs.items()}
    return [_explain_parameter(manifest, consumers, members, at, scatters) for members in forms.values()]


def _matching_parameters(p: Parameters, query: str) -> list[int]:
    hits = dict.fromkeys(_matching(p.names, query))
    return [*hits, *(k for k, names in enumerate(p.aliases) if k not in hits and names and _matching(names, query))]


def _scatters_into(program: Program, parameters: list[int]) -> dict[int, list[int]]:
    """Scatters by the parameter they write, for the given parameters."""
    found: dict[int, list[int]] = {k: [] for k in parameters}
    for s, parameter in enumerate(program.scatters.parameter):
        if parameter in found:
            found[parameter].append(s)
    return found


class _Signatures:
    """What two parameters of one form must agree in to be explained together, on the workers of one program."""

    def __init__(self, manifest: Manifest) -> None:
        self._names = manifest.names
        self._known: dict[Any, Any] = {}

    def __call__(self, program: Program, index: int, scatters: list[int]) -> Any:
        p, s, keys, fills = program.parameters, program.scatters, program.keys, program.fills
        sources = tuple(keys.source[s.key[x]] for x in scatters)
        writes = tuple((keys.region[s.key[x]], s.region[x], program.provenance.scatter_chain[x]) for x in scatters)
        filled = tuple(
            (region, value)
            for at, region, value in zip(fills.parameters, fills.regions, fills.values, strict=True)
            if at == index
        )
        return p.dtypes[index], p.shapes[index], p.strides[index], self._own(p.names[index], sources), writes, filled

    def _own(self, parameter: str, sources: tuple[int, ...]) -> Any:
        """The sources' names, without the layer where that is the parameter's own."""
        layer = indices(parameter)
        if (layer, sources) not in self._known:
            found = []
            for name in map(self._names.__getitem__, sources):
                of = indices(name)
                own = of[: len(layer)] == layer
                found.append((template(name), own, of[len(layer) :] if own else of))
            self._known[layer, sources] = tuple(found)
        return self._known[layer, sources]


def _explain_parameter(
    manifest: Manifest,
    consumers: list[ConsumerPlan],
    members: list[str],
    at: dict[int, dict[str, int]],
    scatters: dict[int, dict[int, list[int]]],
) -> Explained:
    name = members[0]
    places = [(c, at[id(c.program)][name]) for c in consumers if name in at[id(c.program)]]
    rows, fills = [], []
    for c, index in places:
        rows += describe(c, manifest, scatters[id(c.program)][index])
        f = c.program.fills
        for parameter, value in zip(f.parameters, f.values, strict=True):
            if parameter == index:
                fills.append(f"worker {c.consumer_id} fills part of it with {value:g}")
    used = {i: [s for m in members if m in at[i] for s in found[at[i][m]]] for i, found in scatters.items()}
    consumer, index = places[0]
    p = consumer.program.parameters
    return Explained(
        direction="parameter",
        name=name,
        like_it=tuple(members),
        slots=False,
        dtype=p.dtypes[index],
        shape=p.shapes[index],
        group=p.module_names[p.modules[index]],
        owners=(),
        workers=tuple(sorted(c.consumer_id for c, _ in places)),
        writes=_from_all(fold(rows), consumers, used),
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
        slots = ", each one slot further" if e.slots else ""
        count = len(e.like_it) - 1
        others = f"{plural(count, 'name')} that {'travels' if count == 1 else 'travel'} as it does{slots}"
        lines += paragraph(f"  and {others}: {names_text(e.like_it)}", width, 4)
    if e.direction == "source":
        lines += paragraph(f"  gathered with group {e.group}, held by {numbered('trainer rank', e.owners)}", width, 4)
    else:
        alias = f", also known as {', '.join(e.aliases)}" if e.aliases else ""
        lines += paragraph(f"  of module {e.group} on {numbered('worker', e.workers)}{alias}", width, 4)
    for fill in dict.fromkeys(e.fills):
        lines += paragraph(f"  {fill}", width, 4)
    if not e.writes:
        none = "no worker takes it" if e.direction == "source" else "nothing of the trainer is written to it"
        return [*lines, *paragraph(f"  {none}", width, 4)]
    return [*lines, *_write_table(e, width), *_how(e, width)]


def _write_table(e: Explained, width: int) -> list[str]:
    rows = []
    for w in e.writes:
        source = f"{names_text(w.sources, ' ')} " if e.direction == "parameter" else ""
        target = f"{w.parameter} " if e.direction == "source" else ""
        row = [ranges(w.workers), ranges(w.producers), source + w.slice, target + w.destination, human_bytes(w.nbytes)]
        rows.append(row)
    heads = ["worker", "from rank", "slice", "lands in", "bytes"]
    return table("", heads, rows, width, text=(0, 1, 2, 3))


def _how(e: Explained, width: int) -> list[str]:
    legend = letters_text(e.writes)
    lines = paragraph(f"  {legend}", width, 4) if legend else []
    for text in dict.fromkeys(f"  {w.chain}, by {w.loader}" for w in e.writes):
        lines += paragraph(text, width, 4)
    return lines
