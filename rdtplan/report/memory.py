"""`rdtplan mem`: peak bytes by part, for every worker and trainer rank."""

from __future__ import annotations

from math import prod
from typing import Any

from rdtplan.ir.dtypes import itemsize
from rdtplan.ir.file import PlanFile
from rdtplan.ir.traces import Parameters
from rdtplan.report.inspect import collapse
from rdtplan.report.tables import paragraph, table
from rdtplan.report.units import human_bytes, ranges


def parameters_nbytes(parameters: Parameters) -> int:
    """Bytes of a worker's parameters and buffers in checkpoint format, aliases counted once."""
    return sum(prod(s) * itemsize(d) for s, d in zip(parameters.shapes, parameters.dtypes, strict=True))


def forecast(file: PlanFile) -> dict[str, Any]:
    """Peak bytes by part, JSON-ready."""
    memory, settings, overview = file.field("memory"), file.field("settings"), file.field("overview")
    groups = file.field("groups")
    workers = []
    largest: tuple[int, str, int] = (0, "", 0)
    for c, pool in enumerate(memory.receive_pool_nbytes):
        chunks = file.table(c, "chunks")
        top = max(range(len(chunks)), key=lambda k: chunks.nbytes[k], default=None)
        if top is not None and chunks.nbytes[top] > largest[0]:
            largest = (chunks.nbytes[top], groups[chunks.group[top]].label, c)
        lanes = pool // (memory.receive_slot_nbytes * settings.num_rdt_buffers) if memory.receive_slot_nbytes else 0
        workers.append(
            {
                "consumer": c,
                "receive_pool_nbytes": pool,
                "lanes": lanes,
                "slots": lanes * settings.num_rdt_buffers,
                "largest_chunk_nbytes": max(chunks.nbytes, default=0),
                "parameters_nbytes": parameters_nbytes(file.table(c, "parameters")),
            }
        )
    ranks = [
        {
            "rank": r,
            "serve_ring_nbytes": ring,
            "resident_gather_nbytes": resident,
            "together_nbytes": ring + resident,
            "groups_resident": settings.gather_lookahead + 1,
        }
        for r, (ring, resident) in enumerate(zip(memory.serve_ring_nbytes, memory.resident_gather_nbytes, strict=True))
    ]
    biggest = max(groups, key=lambda g: g.nbytes, default=None)
    return {
        "receive_slot_nbytes": memory.receive_slot_nbytes,
        "largest_chunk": {"nbytes": largest[0], "group": largest[1], "consumer": largest[2]},
        "largest_group": {"nbytes": biggest.nbytes, "group": biggest.label} if biggest else None,
        "staging_device": settings.staging_device,
        "num_rdt_buffers": settings.num_rdt_buffers,
        "workers": workers,
        "trainer_ranks": ranks,
        "model_nbytes": overview.manifest_nbytes,
    }


def render_forecast(m: dict[str, Any], width: int) -> list[str]:
    """The forecast as lines. The receive pool and the serve rings exist with transport nixl only."""
    big, group = m["largest_chunk"], m["largest_group"]
    lines = paragraph(
        f"receive slot {human_bytes(m['receive_slot_nbytes'])} on the {m['staging_device']}: the largest chunk is "
        f"{human_bytes(big['nbytes'])} (worker {big['consumer']}, group {big['group']}), or "
        "buffer_presize_gb where that is more, rounded up to a multiple of 256 MiB",
        width,
        2,
    )
    rows = [
        [
            ranges(numbers),
            f"{w['lanes']} x {m['num_rdt_buffers']}",
            human_bytes(w["receive_pool_nbytes"]),
            human_bytes(w["largest_chunk_nbytes"]),
            human_bytes(w["parameters_nbytes"]),
        ]
        for numbers, w in collapse(m["workers"], "consumer")
    ]
    heads = ["worker", "lanes x K", "receive pool", "largest chunk", "parameters"]
    lines += ["", *table("workers, each", heads, rows, width)]
    rows = [
        [
            ranges(numbers),
            human_bytes(r["serve_ring_nbytes"]),
            human_bytes(r["resident_gather_nbytes"]),
            human_bytes(r["together_nbytes"]),
        ]
        for numbers, r in collapse(m["trainer_ranks"], "rank")
    ]
    heads = ["rank", "serve rings", "resident gather", "together"]
    lines += ["", *table("trainer ranks, each", heads, rows, width)]
    if group:
        resident = m["trainer_ranks"][0]["groups_resident"] if m["trainer_ranks"] else 1
        lines += paragraph(
            f"resident gather is {resident} x a rank's part of its largest group; the largest of all is "
            f"{group['group']}, {human_bytes(group['nbytes'])}",
            width,
            2,
        )
    return [*lines, *paragraph("transport local needs neither receive pool nor serve rings", width, 2)]
