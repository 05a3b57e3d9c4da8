"""`rdtplan diff` as text: the first line names the cause, a screen holds the rest."""

from __future__ import annotations

from typing import Any

from attrs import asdict

from rdtplan.report.compare import Effect, Figure, PlanDiff
from rdtplan.report.names import brief
from rdtplan.report.tables import paragraph, table
from rdtplan.report.units import human_bytes, plural

SHOWN = 16
"""Families of names shown of each kind."""

_TITLES = {
    "source": "source names",
    "owners": "owners",
    "parameter": "parameters of the model",
    "slices": "how a replica's workers together cut the sources",
    "loader": "loaders that wrote (provenance; outside the identity)",
    "moved": "loaders on other lines (provenance; outside the identity)",
}


def as_json(diff: PlanDiff) -> dict[str, Any]:
    """JSON-ready."""
    return {**asdict(diff), "cause": diff.cause}


def render(diff: PlanDiff, width: int) -> list[str]:
    """Lines of the comparison."""
    lines = paragraph(headline(diff), width, 2)
    if diff.same:
        return lines + _effects(diff.effects, width)
    a, b = diff.identities
    lines += paragraph(f"plan {a[:16]} -> {b[:16]}", width, 2)
    if diff.figures:
        rows = [[f.name, _figure(f, f.before), _figure(f, f.after), _change(f)] for f in diff.figures]
        lines += ["", *table("the fleet", ["", "before", "after", "change"], rows, width)]
    return lines + _effects(diff.effects, width)


def headline(diff: PlanDiff) -> str:
    """The cause, or that there is none."""
    if diff.same:
        compiled = f"; compiled otherwise: {diff.cause}" if diff.cause else ""
        return f"same plan {diff.identities[0][:16]}{compiled}"
    return (
        f"different: {diff.cause}"
        if diff.cause
        else (
            "different, though no input differs: the loaders or the compiler do something else under the same version"
        )
    )


def _figure(figure: Figure, span: tuple[int, ...]) -> str:
    return " to ".join(human_bytes(n) if figure.unit == "bytes" else f"{n:,}" for n in span)


def _change(figure: Figure) -> str:
    old, new = figure.before[-1], figure.after[-1]
    return f"x{new / old:.2f}" if old and new else ""


def _effects(effects: tuple[Effect, ...], width: int) -> list[str]:
    lines: list[str] = []
    for kind in dict.fromkeys(e.kind for e in effects):
        members = [e for e in effects if e.kind == kind]
        title = _TITLES.get(kind, kind)
        if kind == "loader":
            rows = [[e.before, e.after] for e in members[:SHOWN]]
            lines += ["", *table(title, ["before", "after"], rows, width, text=(0, 1))]
        elif kind == "moved":
            rows = [[e.names, e.before, e.after] for e in members[:SHOWN]]
            lines += ["", *table(title, ["loader", "line before", "line after"], rows, width, text=(0, 1, 2))]
        else:
            rows = [[brief(e.names), f"{e.count:,}", e.before, e.after] for e in members[:SHOWN]]
            lines += ["", *table(title, ["names", "count", "before", "after"], rows, width, text=(0, 2, 3))]
        if len(members) > SHOWN:
            rest = sum(e.count for e in members[SHOWN:])
            lines += paragraph(f"... and {plural(len(members) - SHOWN, 'line')} more ({plural(rest, 'name')})", width)
    return lines
