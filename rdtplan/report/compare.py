"""Two plans compared: cause first, then what follows from it, folded over layers, experts and ranks.

Plans are *the same* when their identities are equal: they move the same bytes to the same places under the same
settings. Versions and the op chains of the loaders may differ all the same; the comparison says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise, zip_longest
from typing import Any

from attrs import fields, frozen

from rdtplan.errors import PlanError
from rdtplan.ir.dtypes import itemsize
from rdtplan.ir.experts import differences
from rdtplan.ir.plan import ConsumerPlan, Program
from rdtplan.ir.view import PlanView, placement_of
from rdtplan.report.names import fold_names, template
from rdtplan.report.units import human_bytes, numbered, plural

FULL_COMPARISONS = 2
"""Pairs of programs that are compared write by write; ranks of one fleet differ in the same way."""


@frozen(slots=True)
class Change:
    """One input of the compiler that differs. `before` and `after` are JSON-ready."""

    field: str
    before: Any
    after: Any
    text: str


@frozen(slots=True)
class Figure:
    """One number of the fleet that differs: a total, or the range over workers or ranks."""

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    unit: str
    """`bytes` or empty."""


@frozen(slots=True)
class Effect:
    """What happens to a family of names: folded over layers and experts."""

    kind: str
    """`source`, `parameter`, `slices`, `writes`, `owners`, `loader` or `moved` (a loader on another line)."""
    names: str
    count: int
    before: str
    after: str


@frozen(slots=True)
class PlanDiff:
    """The whole comparison. `same` means equal identities."""

    same: bool
    identities: tuple[str, str]
    causes: tuple[Change, ...]
    figures: tuple[Figure, ...]
    effects: tuple[Effect, ...]

    @property
    def cause(self) -> str:
        """The cause in a few words; empty when no input differs."""
        return "; ".join(c.text for c in self.causes)


def compare(a: PlanView, b: PlanView) -> PlanDiff:
    """Everything that differs between two plans. PlanError RDT330 when one of them must have been forged."""
    identities = (a.field("identity"), b.field("identity"))
    causes = tuple(_causes(a, b))
    if identities[0] == identities[1]:
        _check_identities(identities[0], causes)
        effects = () if a.digest == b.digest else tuple(_provenance(_workers(a), _workers(b)))
        return PlanDiff(True, identities, causes, (), effects)
    before, after = _workers(a), _workers(b)
    effects = (
        *_manifests(a, b),
        *_owners(a, b),
        *_parameters(before, after),
        *_slices(a, b, before, after),
        *_writes(a, b, before, after),
        *_provenance(before, after),
    )
    return PlanDiff(False, identities, causes, tuple(_figures(a, b)), effects)


_DECIDING = ("compiler.target", "model.", "topology.", "settings.", "ownership", "manifest", "program.")
"""Inputs that are in the identity, by the start of `Change.field`."""


def _check_identities(identity: str, causes: tuple[Change, ...]) -> None:
    """PlanError RDT330 when plans say that they are the same and have inputs that make them differ."""
    other = [c.text for c in causes if c.field.startswith(_DECIDING)]
    if other:
        raise PlanError(
            f"both plans have the identity {identity[:16]}, which cannot be: {'; '.join(other)}",
            fix="run `rdtplan verify` on both; one of them was changed by something else than rdtplan",
            code="RDT330",
        )


def _workers(plan: PlanView) -> list[ConsumerPlan]:
    return [plan.consumer(c) for c in range(plan.field("topology").workers)]


def _programs(workers: Iterable[ConsumerPlan]) -> list[Program]:
    return list({id(c.program): c.program for c in workers}.values())


# -- causes ----------------------------------------------------------------------------------------------------

_LABELS = {
    "tensor_parallel": "TP",
    "pipeline_parallel": "PP",
    "data_parallel": "DP",
    "expert_parallel": "EP",
    "redundant_experts": "redundant experts (EPLB)",
    "num_rdt_buffers": "num_rdt_buffers (K)",
    "stages_in_flight": "stages_in_flight (S)",
    "config_digest": "config.json",
}


def _causes(a: PlanView, b: PlanView) -> list[Change]:
    found: list[Change] = []
    for part in ("compiler", "model", "topology", "settings"):
        old, new = a.field(part), b.field(part)
        for f in fields(type(old)):
            x, y = getattr(old, f.name), getattr(new, f.name)
            if x != y:
                label = _LABELS.get(f.name, f.name)
                found.append(Change(f"{part}.{f.name}", x, y, f"{label} {_short(x)} -> {_short(y)}"))
    old, new = a.field("ownership"), b.field("ownership")
    if old.ranks != new.ranks:
        found.append(Change("ownership.ranks", old.ranks, new.ranks, f"trainer ranks {old.ranks} -> {new.ranks}"))
    elif _other_owners(a, b):
        digests = a.field("ownership_digest"), b.field("ownership_digest")
        found.append(Change("ownership", *digests, "trainer ranks own other names"))
    if a.field("manifest_digest") != b.field("manifest_digest"):
        old, new = a.field("manifest"), b.field("manifest")
        text = f"manifest of {len(old):,} -> {len(new):,} names" if len(old) != len(new) else "another manifest"
        found.append(Change("manifest", a.field("manifest_digest"), b.field("manifest_digest"), text))
    found += _placements(a, b)
    waivers = [[f"{w.code}:{w.pattern}" for w in x.field("waivers")] for x in (a, b)]
    if waivers[0] != waivers[1]:
        found.append(Change("waivers", *waivers, f"waivers {_short(waivers[0])} -> {_short(waivers[1])}"))
    return found


def _placements(a: PlanView, b: PlanView) -> list[Change]:
    """Layers of experts that both plans have, in as many slots, where slots hold another expert."""
    old, new = placement_of(a), placement_of(b)
    rows = [m for m in old if m in new and len(old[m]) == len(new[m]) and old[m] != new[m]]
    if not rows:
        return []
    first, total = rows[0], sum(len(differences(old[m], new[m])) for m in rows)
    slot = differences(old[first], new[first])[0]
    more = f", and {total - 1:,} more" if total > 1 else ""
    text = f"expert placement: {first} slot {slot}: expert {old[first][slot]} -> expert {new[first][slot]}{more}"
    before, after = ({m: list(side[m]) for m in rows} for side in (old, new))
    return [Change("program.experts", before, after, text)]


def _other_owners(a: PlanView, b: PlanView) -> bool:
    """Does a name that both manifests have, or in one and the same manifest any name, have other owners?"""
    if a.field("ownership_digest") == b.field("ownership_digest"):
        return False
    old, new = _owner_texts(a), _owner_texts(b)
    return any(new.get(name, owners) != owners for name, owners in old.items())


def _owner_texts(plan: PlanView) -> dict[str, str]:
    o = plan.field("ownership")
    texts = [numbered("rank", c) for c in o.classes]
    return {name: texts[o.class_of[k]] for k, name in enumerate(plan.field("manifest").names)}


def _short(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "on", False: "off", None: "none"}[value]
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)


# -- figures ---------------------------------------------------------------------------------------------------


def _figures(a: PlanView, b: PlanView) -> list[Figure]:
    rows: list[tuple[str, tuple[int, ...], tuple[int, ...], str]] = []
    x, y = a.field("overview"), b.field("overview")
    m, n = a.field("memory"), b.field("memory")
    rows += [
        ("workers", (len(x.pulls),), (len(y.pulls),), ""),
        ("trainer ranks", (len(x.served_pulls),), (len(y.served_pulls),), ""),
        ("bytes a sync, all workers", (sum(x.pulled_nbytes),), (sum(y.pulled_nbytes),), "bytes"),
        ("bytes a worker", x.pulled_nbytes, y.pulled_nbytes, "bytes"),
        ("pulls a worker", x.pulls, y.pulls, ""),
        ("scatters a worker", x.scatters, y.scatters, ""),
        ("streams a worker", x.streams, y.streams, ""),
        ("bytes served by a trainer rank", x.served_nbytes, y.served_nbytes, "bytes"),
        ("pulls served by a trainer rank", x.served_pulls, y.served_pulls, ""),
        ("receive slot", (m.receive_slot_nbytes,), (n.receive_slot_nbytes,), "bytes"),
        ("receive pool of a worker", m.receive_pool_nbytes, n.receive_pool_nbytes, "bytes"),
        ("serve rings of a trainer rank", m.serve_ring_nbytes, n.serve_ring_nbytes, "bytes"),
        ("resident gather of a trainer rank", m.resident_gather_nbytes, n.resident_gather_nbytes, "bytes"),
        ("gather groups", (len(a.field("groups")),), (len(b.field("groups")),), ""),
    ]
    found = [Figure(name, _span(u), _span(v), unit) for name, u, v, unit in rows]
    return [f for f in found if f.before != f.after]


def _span(column: tuple[int, ...]) -> tuple[int, ...]:
    """Least and largest, one number when they are equal."""
    return tuple(sorted({min(column, default=0), max(column, default=0)}))


# -- effects ---------------------------------------------------------------------------------------------------


def _folded(kind: str, changes: Iterable[tuple[str, str, str]]) -> list[Effect]:
    """Effects of (name, before, after), names that change in the same way folded."""
    families: dict[tuple[str, str, str], list[str]] = {}
    for name, before, after in changes:
        families.setdefault((template(name), before, after), []).append(name)
    return [
        Effect(kind, folded.pattern, folded.count, before, after)
        for (_, before, after), names in families.items()
        for folded in fold_names(names)
    ]


def _manifests(a: PlanView, b: PlanView) -> list[Effect]:
    if a.field("manifest_digest") == b.field("manifest_digest"):
        return []
    tables = []
    for plan in (a, b):
        m = plan.field("manifest")
        tables.append({name: f"{m.dtype(k)} {list(m.shape(k))}" for k, name in enumerate(m.names)})
    old, new = tables
    changes = [(n, old.get(n, "absent"), new.get(n, "absent")) for n in {**old, **new} if old.get(n) != new.get(n)]
    if not changes:
        return [Effect("source", "all names", len(old), "one order", "another order")]
    return _folded("source", changes)


def _owners(a: PlanView, b: PlanView) -> list[Effect]:
    if a.field("ownership_digest") == b.field("ownership_digest"):
        return []
    old, new = _owner_texts(a), _owner_texts(b)
    if len(set(old.values())) == len(set(new.values())) == 1 and old.keys() == new.keys():
        return [Effect("owners", "every source name", len(old), next(iter(old.values())), next(iter(new.values())))]
    return _folded("owners", [(n, old[n], new[n]) for n in old if n in new and old[n] != new[n]])


def _parameters(before: list[ConsumerPlan], after: list[ConsumerPlan]) -> list[Effect]:
    """Parameters that have another dtype, shape or stride, or are on one side only."""
    old, new = _geometry(before), _geometry(after)
    changes = [(n, old.get(n, "absent"), new.get(n, "absent")) for n in {**old, **new} if old.get(n) != new.get(n)]
    return _folded("parameter", changes)


def _geometry(workers: list[ConsumerPlan]) -> dict[str, str]:
    """Dtype, shape and, where it is not row-major, stride of every parameter; all variants over the workers."""
    variants: dict[str, dict[str, None]] = {}
    tables = {id(p): p for p in (c.program.parameters for c in workers)}
    for p in tables.values():
        for name, dtype, shape, stride in zip(p.names, p.dtypes, p.shapes, p.strides, strict=True):
            dense = all(s >= t for s, t in pairwise(stride))
            text = f"{dtype} {list(shape)}" + ("" if dense else f" stride {list(stride)}")
            variants.setdefault(name, {})[text] = None
    return {name: " or ".join(texts) for name, texts in variants.items()}


def _slices(a: PlanView, b: PlanView, before: list[ConsumerPlan], after: list[ConsumerPlan]) -> list[Effect]:
    """Sources that the workers of a replica cut into other pieces."""
    old, new = _cuts(a, before), _cuts(b, after)
    names = [n for n in old if n in new and old[n] != new[n]]
    texts = {cut: _cut_text(cut) for cut in {old[n] for n in names} | {new[n] for n in names}}
    return _folded("slices", [(n, texts[old[n]], texts[new[n]]) for n in names])


Cut = tuple[tuple[int, int], ...]
"""(bytes of a slice, how many of them), ascending."""


def _cuts(plan: PlanView, workers: list[ConsumerPlan]) -> dict[str, Cut]:
    """How the workers of one replica together cut every source name."""
    names = plan.field("manifest").names
    alike: dict[tuple[int, ...], list[list[int]]] = {}
    for c in workers:
        if c.replica:
            continue
        keys, p = c.program.keys, c.program
        sizes = [itemsize(d) for d in p.dtype_table]
        numels = [r.numel for r in p.regions]
        nbytes = [numels[r] * sizes[d] for r, d in zip(keys.region, keys.dtype, strict=True)]
        alike.setdefault(keys.source, []).append(nbytes)
    pieces: list[tuple[int, ...]] = [()] * len(names)
    for sources, columns in alike.items():  # workers that read the same sources in the same order, side by side
        for source, piece in zip(sources, zip(*columns, strict=True), strict=True):
            pieces[source] += piece
    known: dict[tuple[int, ...], Cut] = {}
    found: dict[str, Cut] = {}
    for name, piece in zip(names, pieces, strict=True):
        if piece not in known:
            known[piece] = tuple(sorted(Counter(piece).items()))
        found[name] = known[piece]
    return found


def _cut_text(cut: Cut) -> str:
    return " + ".join(f"{n:,} x {human_bytes(nbytes)}" for nbytes, n in cut) or "nobody takes it"


def _writes(a: PlanView, b: PlanView, before: list[ConsumerPlan], after: list[ConsumerPlan]) -> list[Effect]:
    """Where fleets and models have the same form: writes that come from, or go to, another place."""
    same = all(a.field(name) == b.field(name) for name in ("topology", "manifest_digest"))
    if not same or _geometry(before) != _geometry(after):
        return []
    pairs: dict[tuple[int, int], tuple[ConsumerPlan, ConsumerPlan]] = {}
    for x, y in zip(before, after, strict=True):
        if not _same_tables(x.program, y.program):
            pairs.setdefault((id(x.program), id(y.program)), (x, y))
    found: list[Effect] = []
    for x, y in list(pairs.values())[:FULL_COMPARISONS]:
        old, new = _places(a, x.program), _places(b, y.program)
        gone, added = Counter(old - new), Counter(new - old)
        names = dict.fromkeys(place[0] for place in (*gone, *added))
        texts = [dict.fromkeys(names, ""), dict.fromkeys(names, "")]
        for side, places in zip(texts, (gone, added), strict=True):
            count = Counter(place[0] for place in places.elements())
            side.update({n: f"{count[n]} other" if count[n] else "none" for n in names})
        where = f"writes of worker {x.consumer_id}"
        found += _folded(where, [(n, texts[0][n], texts[1][n]) for n in names])
    more = len(pairs) - FULL_COMPARISONS
    if found and more > 0:
        found.append(Effect("writes", f"{plural(more, 'program')} more", more, "", "differ as well"))
    return found


def _same_tables(x: Program, y: Program) -> bool:
    tables = ("regions", "keys", "scatters", "chunks", "parameters", "fills")
    return all(getattr(x, t) == getattr(y, t) for t in tables)


def _places(plan: PlanView, program: Program) -> Counter[tuple[Any, ...]]:
    """(source, slice, parameter, destination) of every write."""
    names, p = plan.field("manifest").names, program.parameters.names
    regions = [(r.offset, r.shape, r.stride) for r in program.regions]
    keys, s = program.keys, program.scatters
    return Counter(
        (names[keys.source[k]], regions[keys.region[k]], p[parameter], regions[region])
        for k, parameter, region in zip(s.key, s.parameter, s.region, strict=True)
    )


def _provenance(before: list[ConsumerPlan], after: list[ConsumerPlan]) -> list[Effect]:
    """Loaders that did the writing and are on one side only."""
    old, new = (
        _by_place(loader for p in _programs(side) for loader in p.provenance.loaders) for side in (before, after)
    )
    gone = [f"{place[:-1]}:{lines})" for place, lines in old.items() if place not in new]
    added = [f"{place[:-1]}:{lines})" for place, lines in new.items() if place not in old]
    moved = [place for place in old if place in new and old[place] != new[place]]
    return [
        *(Effect("loader", "", 1, x, y) for x, y in zip_longest(gone, added, fillvalue="none")),
        *(Effect("moved", place, 1, old[place], new[place]) for place in moved),
    ]


def _by_place(loaders: Iterable[str]) -> dict[str, str]:
    """Loaders given as `function (file:line)`: `function (file)` -> its lines."""
    lines: dict[str, dict[str, None]] = {}
    for place, _, line in (loader.rpartition(":") for loader in loaders):
        lines.setdefault(f"{place})", {})[line.removesuffix(")")] = None
    return {place: ", ".join(found) for place, found in lines.items()}
