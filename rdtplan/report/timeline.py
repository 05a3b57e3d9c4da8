"""`rdtplan simulate` as text and JSON, and a recorded run laid over it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from attrs import asdict

from rdtplan.errors import InputError
from rdtplan.report.simulate import PullTimes, Simulation, link_loads
from rdtplan.report.tables import paragraph, sparkline, table
from rdtplan.report.units import human_bytes, human_rate, human_seconds, numbered, plural, ranges

BINS = 40
"""Steps of a timeline."""


def as_json(s: Simulation, actual: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """JSON-ready: totals, one object a link and a stream, every pull and every group."""
    costs = {k: None if v == math.inf else v for k, v in asdict(s.costs).items()}
    found = {
        "costs": costs,
        "seconds": s.seconds,
        "floor_s": s.floor_s,
        "of_floor": s.of_floor,
        "bottleneck": s.bottleneck,
        "shares": s.shares,
        "producer_links": links(s, "producer"),
        "consumer_links": links(s, "consumer"),
        "streams": links(s, "stream"),
        "pulls": [asdict(p) for p in s.pulls],
        "groups": [asdict(g) for g in s.groups],
    }
    return found if actual is None else {**found, "actual": overlay(s, actual)}


def links(s: Simulation, end: str) -> list[dict[str, Any]]:
    """Load of every producer link, consumer link or stream, with its use over time (`BINS` steps, parts of 1)."""
    found = []
    for number, mine in link_loads(s.pulls, end).items():
        nbytes = sum(p.nbytes for p in mine)
        links_used = len({p.producer for p in mine}) if end == "stream" else 1
        found.append(
            {
                "number": number,
                "nbytes": nbytes,
                "pulls": len(mine),
                "utilization": nbytes / (s.costs.bandwidth * links_used) / s.seconds if s.seconds else 0.0,
                "first_issued": min(p.issued for p in mine),
                "last_landed": max(p.landed for p in mine),
                "over_time": use_over_time(mine, s, links_used),
            }
        )
    return found


def use_over_time(pulls: list[PullTimes], s: Simulation, links_used: int = 1) -> list[float]:
    """Part of the links in use in each of `BINS` equal steps; the bytes of a pull are spread over its transfer."""
    width = s.seconds / BINS or 1.0
    used = [0.0] * BINS
    for p in pulls:
        rate = p.nbytes / max(p.landed - p.ready, 1e-9)
        for k in range(int(p.ready / width), min(BINS - 1, int(p.landed / width)) + 1):
            overlap = min(p.landed, (k + 1) * width) - max(p.ready, k * width)
            used[k] += max(0.0, overlap) * rate
    return [round(min(1.0, n / (s.costs.bandwidth * links_used * width)), 4) for n in used]


def render(s: Simulation, width: int, actual: list[dict[str, Any]] | None = None) -> list[str]:
    """Prediction, links, streams, and the recorded run when there is one."""
    which = "first sync (one pull at a time)" if s.costs.first_sync else "sync"
    nbytes = sum(p.nbytes for p in s.pulls)
    lines = paragraph(
        f"predicted {which}: {human_seconds(s.seconds)}, {s.of_floor:.2f}x the link-bound floor of "
        f"{human_seconds(s.floor_s)}; {human_bytes(nbytes)} in {plural(len(s.pulls), 'pull')}",
        width,
        2,
    )
    lines += paragraph(f"bottleneck: {s.bottleneck}", width, 2)
    waits = ", ".join(f"{100 * v:.0f}% {name}" for name, v in _share_words(s))
    lines += paragraph(f"a pull spends {waits}", width, 2)
    c = s.costs
    lines += paragraph(
        f"assumed: links {human_rate(c.bandwidth)}, latency {human_seconds(c.latency_s)}, gather "
        f"{human_seconds(c.gather_s)} for the largest group, scatter {human_rate(c.scatter_bandwidth)}",
        width,
        2,
    )
    for end, title in (("producer", "trainer ranks' links"), ("consumer", "workers' links"), ("stream", "streams")):
        lines += ["", *_link_table(links(s, end), title, width)]
    return [*lines, *(_actual_lines(overlay(s, actual), width) if actual is not None else [])]


def _share_words(s: Simulation) -> list[tuple[str, float]]:
    words = {"publish": "waiting for its group", "messages": "on messages", "transfer": "in transfer"}
    return [(words[k], v) for k, v in s.shares.items()]


def _link_table(rows: list[dict[str, Any]], title: str, width: int) -> list[str]:
    folded: dict[Any, list[dict[str, Any]]] = {}
    for r in rows:
        line = sparkline(r["over_time"])
        folded.setdefault((r["nbytes"], r["pulls"], f"{r['last_landed']:.3g}", line), []).append(r)
    cells = [
        [
            ranges([r["number"] for r in members]),
            human_bytes(nbytes),
            f"{pulls:,}",
            f"{100 * members[0]['utilization']:.0f}%",
            human_seconds(members[0]["last_landed"]),
            line,
        ]
        for (nbytes, pulls, _, line), members in folded.items()
    ]
    return table(title, ["", "bytes each", "pulls", "use", "until", "use over time"], cells, width, graphs=(5,))


# -- a recorded run ------------------------------------------------------------------------------------------------


def read_run(path: Path, sync: int | None = None) -> list[dict[str, Any]]:
    """Records of one sync of a `run.jsonl`: one object a process. The last sync unless `sync` is given.

    InputError RDT108 when the file is unreadable, a line is no object, a figure is negative, or no record fits. Fields
    may be missing.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--actual: cannot read {path}: {error}", code="RDT108") from None
    records: list[dict[str, Any]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise InputError(f"--actual: {path} line {number} is no JSON object: {line[:60]!r}", code="RDT108")
        if record.get("role") in ("consumer", "producer") and type(record.get("id")) is int:
            for name in ("seconds", "bytes", "pulls", "wait_s"):
                if (_number(record.get(name)) or 0) < 0:
                    raise InputError(f"--actual: {path} line {number}: {name} is {record[name]}", code="RDT108")
            records.append(record)
    syncs = sorted({r["sync"] for r in records if type(r.get("sync")) is int})
    if not syncs:
        raise InputError(
            f"--actual: {path} has no record of a consumer or producer with its id and sync",
            fix="name the file of a recorded run, as docs/inspection.md describes it",
            code="RDT108",
        )
    if sync is not None and sync not in syncs:
        raise InputError(f"--actual-sync {sync}: {path} has {numbered('sync', syncs)}", code="RDT108")
    wanted = syncs[-1] if sync is None else sync
    return [r for r in records if r.get("sync") == wanted]


def overlay(s: Simulation, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Predicted beside recorded: every process, and the chunks that landed later than predicted.

    InputError RDT108 when a process was recorded that the plan does not have.
    """
    ranks = {g.producer for g in s.groups}
    for r in records:
        if not (0 <= r["id"] < s.workers if r["role"] == "consumer" else r["id"] in ranks):
            has = numbered("worker", range(s.workers)) if r["role"] == "consumer" else numbered("trainer rank", ranks)
            raise InputError(f"--actual: {r['role']} {r['id']} was recorded, the plan has {has}", code="RDT108")
    consumers, producers = link_loads(s.pulls, "consumer"), link_loads(s.pulls, "producer")
    rows = []
    for r in sorted(records, key=lambda r: (r["role"], r["id"])):
        mine = (consumers if r["role"] == "consumer" else producers).get(r["id"], [])
        predicted = max((p.scattered for p in mine), default=0.0) if r["role"] == "consumer" else s.seconds
        seconds = _number(r.get("seconds"))
        rows.append(
            {
                "role": r["role"],
                "id": r["id"],
                "predicted_s": predicted,
                "actual_s": seconds,
                "ratio": seconds / predicted if seconds is not None and predicted else None,
                "wait_s": _number(r.get("wait_s")),
                "planned_nbytes": sum(p.nbytes for p in mine),
                "nbytes": _number(r.get("bytes")),
                "planned_pulls": len(mine),
                "pulls": _number(r.get("pulls")),
            }
        )
    late = sorted((x for r in records for x in _late(r, consumers, s.labels)), key=lambda x: -x["late_s"])
    return {"sync": records[0].get("sync"), "processes": rows, "late_chunks": late[:20]}


def _number(value: Any) -> Any:
    return value if type(value) in (int, float) and math.isfinite(value) else None


def _late(
    record: dict[str, Any], consumers: dict[int, list[PullTimes]], labels: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Chunks of one recorded consumer, with how much later than predicted they landed."""
    rows = record.get("chunks")
    if record["role"] != "consumer" or not isinstance(rows, list):
        return []
    rows = [r for r in rows if isinstance(r, list) and len(r) >= 4 and all(_number(x) is not None for x in r[:4])]
    began = min((r[1] for r in rows), default=0.0)
    predicted = {p.chunk: p for p in consumers.get(record["id"], [])}
    return [
        {
            "consumer": record["id"],
            "chunk": int(r[0]),
            "group": predicted[r[0]].group,
            "label": labels[predicted[r[0]].group],
            "producer": predicted[r[0]].producer,
            "predicted_landed_s": predicted[r[0]].landed,
            "actual_landed_s": r[3] - began,
            "late_s": r[3] - began - predicted[r[0]].landed,
            "actual_pull_s": r[3] - r[1],
            "predicted_pull_s": predicted[r[0]].landed - predicted[r[0]].issued,
        }
        for r in rows
        if r[0] in predicted
    ]


def _actual_lines(found: dict[str, Any], width: int) -> list[str]:
    rows = []
    for r in found["processes"]:
        rate = r["nbytes"] / r["actual_s"] if r["nbytes"] and r["actual_s"] else None
        rows.append(
            [
                f"{r['role']} {r['id']}",
                human_seconds(r["predicted_s"]),
                "-" if r["actual_s"] is None else human_seconds(r["actual_s"]),
                "-" if r["ratio"] is None else f"x{r['ratio']:.2f}",
                "-" if r["wait_s"] is None else human_seconds(r["wait_s"]),
                "-" if rate is None else human_rate(rate),
            ]
        )
    heads = ["", "predicted", "recorded", "ratio", "waited", "rate"]
    lines = ["", *table(f"recorded run, sync {found['sync']}", heads, rows, width)]
    for r in found["processes"]:
        for what, planned, actual in (
            ("bytes", r["planned_nbytes"], r["nbytes"]),
            ("pulls", r["planned_pulls"], r["pulls"]),
        ):
            if actual is not None and actual != planned:
                sentence = (
                    f"{r['role']} {r['id']} recorded {actual:,} {what}, the plan has {planned:,}: another plan ran"
                )
                lines += paragraph(sentence, width, 2)
    if found["late_chunks"]:
        rows = [
            [
                f"{x['consumer']}:{x['chunk']}",
                x["label"],
                str(x["producer"]),
                human_seconds(x["predicted_landed_s"]),
                human_seconds(x["actual_landed_s"]),
                human_seconds(x["actual_pull_s"]),
            ]
            for x in found["late_chunks"][:8]
        ]
        heads = ["worker:chunk", "group", "from rank", "predicted at", "landed at", "pull took"]
        lines += ["", *table("chunks that landed latest against the prediction", heads, rows, width, text=(0, 1))]
    return lines
