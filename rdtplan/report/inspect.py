"""`rdtplan inspect`: what a plan will do, from the seal alone; nothing heavier than JSON is touched."""

from __future__ import annotations

from typing import Any

from rdtplan.ir.file import PlanFile
from rdtplan.report.tables import make_table
from rdtplan.report.units import human_bytes


def summarize(file: PlanFile) -> dict[str, Any]:
    """Everything `inspect` shows, JSON-ready. Bytes are plain numbers."""
    compiler, model, topology = file.field("compiler"), file.field("model"), file.field("topology")
    settings, overview, memory = file.field("settings"), file.field("overview"), file.field("memory")
    return {
        "plan": {
            "digest": file.digest,
            "identity": file.field("identity"),
            "format_nbytes": file.path.stat().st_size,
            "rdtplan": compiler.rdtplan,
            "vllm": compiler.vllm,
            "torch": compiler.torch,
            "target": compiler.target,
        },
        "model": {
            "architecture": model.architecture,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "config_digest": model.config_digest,
            "source_names": overview.source_names,
            "nbytes": overview.manifest_nbytes,
        },
        "fleet": {
            "tensor_parallel": topology.tensor_parallel,
            "pipeline_parallel": topology.pipeline_parallel,
            "data_parallel": topology.data_parallel,
            "expert_parallel": topology.expert_parallel,
            "replicas": topology.replicas,
            "workers": topology.workers,
            "trainer_ranks": len(overview.served_nbytes),
        },
        "settings": {name: getattr(settings, name) for name in type(settings).__slots__ if name != "__weakref__"},
        "workers": [
            {
                "consumer": i,
                "nbytes": n,
                "pulls": overview.pulls[i],
                "scatters": overview.scatters[i],
                "streams": overview.streams[i],
                "parameters": overview.parameters[i],
                "receive_pool_nbytes": memory.receive_pool_nbytes[i],
            }
            for i, n in enumerate(overview.pulled_nbytes)
        ],
        "trainer_ranks": [
            {
                "rank": r,
                "nbytes": n,
                "pulls": overview.served_pulls[r],
                "serve_ring_nbytes": memory.serve_ring_nbytes[r],
                "resident_gather_nbytes": memory.resident_gather_nbytes[r],
            }
            for r, n in enumerate(overview.served_nbytes)
        ],
        "receive_slot_nbytes": memory.receive_slot_nbytes,
        "notes": list(file.field("notes")),
        "waivers": [f"{w.code}:{w.pattern}" for w in file.field("waivers")],
    }


def print_summary(summary: dict[str, Any], console: Any) -> None:
    """The summary as tables, for a rich console. Equal rows of workers are shown once."""
    plan, model, fleet, settings = (summary[k] for k in ("plan", "model", "fleet", "settings"))
    console.print(
        f"plan {plan['identity'][:16]}  (file {plan['digest'][:16]}, {human_bytes(plan['format_nbytes'])} on disk)",
        style="bold",
    )
    quantization = f", {model['quantization']}" if model["quantization"] else ""
    console.print(
        f"  model    {model['architecture']}, {model['dtype']}{quantization}: {model['source_names']:,} source names, "
        f"{human_bytes(model['nbytes'])}"
    )
    console.print(
        f"  compiled for target {plan['target']} with vllm {plan['vllm']}, torch {plan['torch']}, "
        f"rdtplan {plan['rdtplan']}"
    )
    ep = " + EP" if fleet["expert_parallel"] else ""
    console.print(
        f"  fleet    {fleet['trainer_ranks']} trainer ranks -> {fleet['workers']} workers: "
        f"TP{fleet['tensor_parallel']} "
        f"PP{fleet['pipeline_parallel']} DP{fleet['data_parallel']}{ep}, {fleet['replicas']} replica(s)"
    )
    limit = human_bytes(settings["max_chunk_bytes"]) if settings["max_chunk_bytes"] else "none"
    console.print(
        f"  settings K={settings['num_rdt_buffers']}, S={settings['stages_in_flight']}, "
        f"lookahead {settings['gather_lookahead']}, chunk limit {limit}, "
        f"slot {human_bytes(summary['receive_slot_nbytes'])}"
    )
    table = make_table("workers", "worker", "pulled", "of model", "pulls", "streams", "scatters", "params", "pool")
    for first, last, w in _collapse(summary["workers"], "consumer"):
        table.add_row(
            _range(first, last),
            human_bytes(w["nbytes"]),
            f"{100 * w['nbytes'] / model['nbytes']:.1f}%" if model["nbytes"] else "-",
            f"{w['pulls']:,}",
            str(w["streams"]),
            f"{w['scatters']:,}",
            f"{w['parameters']:,}",
            human_bytes(w["receive_pool_nbytes"]),
        )
    console.print(table)
    table = make_table("trainer ranks", "rank", "served", "pulls", "serve rings", "resident gather")
    for first, last, r in _collapse(summary["trainer_ranks"], "rank"):
        table.add_row(
            _range(first, last),
            human_bytes(r["nbytes"]),
            f"{r['pulls']:,}",
            human_bytes(r["serve_ring_nbytes"]),
            human_bytes(r["resident_gather_nbytes"]),
        )
    console.print(table)
    for note in summary["notes"]:
        console.print(f"  note     {note}", style="yellow")
    for waiver in summary["waivers"]:
        console.print(f"  waived   {waiver}", style="yellow")


def _collapse(rows: list[dict[str, Any]], key: str) -> list[tuple[int, int, dict[str, Any]]]:
    """Runs of rows that differ in nothing but their number."""
    found: list[tuple[int, int, dict[str, Any]]] = []
    for row in rows:
        rest = {k: v for k, v in row.items() if k != key}
        if found and {k: v for k, v in found[-1][2].items() if k != key} == rest:
            found[-1] = (found[-1][0], row[key], found[-1][2])
        else:
            found.append((row[key], row[key], row))
    return found


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
