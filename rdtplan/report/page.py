"""`rdtplan report`: the plan as one self-contained HTML file, which loads nothing from anywhere.

`page.html` beside this file holds layout, style and script; the data go into it as JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from rdtplan.ir.view import PlanView
from rdtplan.report.explain import Explained
from rdtplan.report.names import names_text, template
from rdtplan.report.simulate import Simulation
from rdtplan.report.timeline import links
from rdtplan.report.units import ranges
from rdtplan.report.writes import letters_text
from rdtplan.verify.findings import Finding, waived

PLACE = "/*DATA*/null"
"""Where the template takes the data."""


def page_data(
    file: PlanView,
    summary: dict[str, Any],
    memory: dict[str, Any],
    simulation: Simulation,
    weights: list[Explained],
    findings: list[Finding],
) -> dict[str, Any]:
    """Everything the page shows, JSON-ready. Bytes and seconds are plain numbers."""
    waivers = file.field("waivers")
    return {
        "summary": summary,
        "memory": memory,
        "matrix": pull_matrix(file),
        "simulation": {
            "seconds": simulation.seconds,
            "floor_s": simulation.floor_s,
            "of_floor": simulation.of_floor,
            "bottleneck": simulation.bottleneck,
            "bandwidth": simulation.costs.bandwidth,
            "latency_s": simulation.costs.latency_s,
            "gather_s": simulation.costs.gather_s,
            "producers": links(simulation, "producer"),
            "consumers": links(simulation, "consumer"),
            "streams": links(simulation, "stream"),
        },
        "weights": [_weight(e) for e in weights],
        "findings": [
            {"code": f.code, "severity": f.severity, "sentence": f.sentence, "waived": waived(f, waivers)}
            for f in findings
        ],
    }


def pull_matrix(file: PlanView) -> list[list[int]]:
    """Bytes that each worker (column) pulls from each trainer rank (row)."""
    workers, ranks = file.field("topology").workers, file.field("ownership").ranks
    matrix = [[0] * workers for _ in range(ranks)]
    for c in range(workers):
        consumer = file.consumer(c)
        for rank, nbytes in zip(consumer.routing.producer, consumer.program.chunks.nbytes, strict=True):
            matrix[rank][c] += nbytes
    return matrix


def _weight(e: Explained) -> dict[str, Any]:
    return {
        "pattern": names_text(e.like_it),
        "template": template(e.name),
        "name": e.name,
        "count": len(e.like_it),
        "slots": e.slots,
        "dtype": e.dtype,
        "shape": list(e.shape),
        "owners": ranges(e.owners),
        "legend": letters_text(e.writes),
        "writes": [
            {
                "workers": ranges(w.workers),
                "ranks": ranges(w.producers),
                "slice": w.slice,
                "parameter": w.parameter,
                "destination": w.destination,
                "chain": w.chain,
                "loader": w.loader,
            }
            for w in e.writes
        ],
    }


def render_page(data: dict[str, Any]) -> str:
    """The HTML file. Nothing in the data can end the script element it stands in."""
    text = orjson.dumps(data).decode()
    for character, escape in (("<", "\\u003c"), (">", "\\u003e"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029")):
        text = text.replace(character, escape)
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    before, place, after = page.partition(PLACE)
    assert place, "the template has lost its place for the data"
    return before + text + after
