"""`rdtplan inspect`: what a plan will do. The overview reads the seal and the chunk tables and nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rdtplan.ir.experts import differences
from rdtplan.ir.file import PlanFile
from rdtplan.report.tables import bar, paragraph, table
from rdtplan.report.units import human_bytes, plural, ranges


def summarize(file: PlanFile) -> dict[str, Any]:
    """Everything `inspect` shows, JSON-ready. Bytes are plain numbers."""
    compiler, model, topology = file.field("compiler"), file.field("model"), file.field("topology")
    settings, overview, memory = file.field("settings"), file.field("overview"), file.field("memory")
    return {
        "plan": {
            "digest": file.digest,
            "identity": file.field("identity"),
            "format_nbytes": file.nbytes,
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
            "redundant_experts": topology.redundant_experts,
            "replicas": topology.replicas,
            "workers": topology.workers,
            "trainer_ranks": len(overview.served_nbytes),
        },
        "experts": _experts(file, topology.workers_per_replica),
        "settings": {name: getattr(settings, name) for name in type(settings).__slots__ if name != "__weakref__"},
        "traffic": {
            "nbytes": sum(overview.pulled_nbytes),
            "broadcast_nbytes": overview.manifest_nbytes * topology.workers,
            "pulls": sum(overview.pulls),
        },
        "workers": [
            {
                "consumer": i,
                "nbytes": n,
                "of_broadcast": n / overview.manifest_nbytes if overview.manifest_nbytes else None,
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
                "of_mean": n * len(overview.served_nbytes) / sum(overview.served_nbytes) if n else 0.0,
                "pulls": overview.served_pulls[r],
                "serve_ring_nbytes": memory.serve_ring_nbytes[r],
                "resident_gather_nbytes": memory.resident_gather_nbytes[r],
            }
            for r, n in enumerate(overview.served_nbytes)
        ],
        "chunks": chunk_sizes(file, topology.workers),
        "receive_slot_nbytes": memory.receive_slot_nbytes,
        "notes": list(file.field("notes")),
        "waivers": [f"{w.code}:{w.pattern}" for w in file.field("waivers")],
    }


def _experts(file: PlanFile, workers: int) -> dict[str, int] | None:
    """Layers, experts and slots under EPLB, and in how many slots another expert is than where vLLM starts."""
    layers: dict[str, tuple[int, int, int]] = {}
    for held in (file.table(c, "experts") for c in range(workers)):
        start = 0
        for module, logical, end in zip(held.modules, held.logical, held.slot_end, strict=True):
            moved = len(differences(held.experts[start:end], held.initial[start:end]))
            layers[module] = logical, end - start, moved
            start = end
    if not layers:
        return None
    logical, slots, moved = (sum(column) for column in zip(*layers.values(), strict=True))
    return {"layers": len(layers), "experts": logical, "slots": slots, "moved": moved}


def chunk_sizes(file: PlanFile, workers: int) -> dict[str, Any]:
    """Distribution of the packed chunks over the whole fleet, in buckets from one power of two to the next."""
    tables = Counter(id(file.table(c, "chunks")) for c in range(workers))
    columns = {id(file.table(c, "chunks")): file.table(c, "chunks").nbytes for c in range(workers)}
    sizes: Counter[int] = Counter()
    for key, times in tables.items():
        for nbytes in columns[key]:
            sizes[nbytes] += times
    buckets: dict[int, dict[str, int]] = {}
    for nbytes, times in sizes.items():
        upper = 1 << max(0, nbytes - 1).bit_length()
        bucket = buckets.setdefault(upper, {"up_to": upper, "chunks": 0, "nbytes": 0})
        bucket["chunks"] += times
        bucket["nbytes"] += nbytes * times
    ordered = sorted(sizes.elements())
    return {
        "count": len(ordered),
        "smallest": ordered[0] if ordered else 0,
        "median": ordered[len(ordered) // 2] if ordered else 0,
        "largest": ordered[-1] if ordered else 0,
        "buckets": [buckets[upper] for upper in sorted(buckets)],
    }


def render_summary(summary: dict[str, Any], width: int) -> list[str]:
    """The summary as lines of at most `width` columns. Equal rows are shown once."""
    lines = _head(summary, width)
    lines += ["", *_worker_table(summary, width)]
    lines += ["", *_rank_table(summary, width)]
    lines += ["", *_chunk_table(summary["chunks"], width)]
    for note in summary["notes"]:
        lines += paragraph(f"note: {note}", width, 6)
    for waiver in summary["waivers"]:
        lines += paragraph(f"waived: {waiver}", width, 8)
    return lines


def _head(summary: dict[str, Any], width: int) -> list[str]:
    plan, model, settings = summary["plan"], summary["model"], summary["settings"]
    quantization = f", {model['quantization']}" if model["quantization"] else ""
    limit = human_bytes(settings["max_chunk_bytes"]) if settings["max_chunk_bytes"] else "none"
    traffic = summary["traffic"]
    less = 1 - traffic["nbytes"] / traffic["broadcast_nbytes"] if traffic["broadcast_nbytes"] else 0.0
    facts = [
        ("plan", f"{plan['identity'][:16]} (file {plan['digest'][:16]}, {human_bytes(plan['format_nbytes'])} on disk)"),
        (
            "model",
            f"{model['architecture']}, {model['dtype']}{quantization}: "
            f"{plural(model['source_names'], 'source name')}, {human_bytes(model['nbytes'])}",
        ),
        (
            "compiled",
            f"for {plan['target']} with vllm {plan['vllm']}, torch {plan['torch']}, rdtplan {plan['rdtplan']}",
        ),
        ("fleet", fleet_text(summary["fleet"])),
        (
            "settings",
            f"K={settings['num_rdt_buffers']}, S={settings['stages_in_flight']}, lookahead "
            f"{settings['gather_lookahead']}, chunk limit {limit}, receive slot "
            f"{human_bytes(summary['receive_slot_nbytes'])} ({settings['staging_device']})",
        ),
        (
            "traffic",
            f"{human_bytes(traffic['nbytes'])} a sync in {plural(traffic['pulls'], 'pull')}; a broadcast would send "
            f"{human_bytes(traffic['broadcast_nbytes'])} ({100 * less:.1f}% less)",
        ),
    ]
    if (experts := summary["experts"]) is not None:
        moved, redundant = experts["moved"], experts["slots"] - experts["experts"]
        placed = f"{plural(moved, 'slot')} with another expert than where vLLM starts" if moved else "as vLLM starts"
        layers = plural(experts["layers"], "layer")
        text = f"EPLB: {experts['experts']:,} and {redundant:,} redundant in {layers}; {placed}"
        facts.insert(4, ("experts", text))
    return [line for name, text in facts for line in paragraph(f"{name:<9}{text}", width, 9)]


def fleet_text(fleet: dict[str, Any]) -> str:
    """`8 trainer ranks -> 16 workers: TP8 PP1 DP2 + EP`."""
    ep = " + EP" if fleet["expert_parallel"] else ""
    replicas = f", {fleet['replicas']} replicas" if fleet["replicas"] > 1 else ""
    return (
        f"{plural(fleet['trainer_ranks'], 'trainer rank')} -> {plural(fleet['workers'], 'worker')}: "
        f"TP{fleet['tensor_parallel']} PP{fleet['pipeline_parallel']} DP{fleet['data_parallel']}{ep}{replicas}"
    )


def _worker_table(summary: dict[str, Any], width: int) -> list[str]:
    rows = [
        [
            ranges(numbers),
            human_bytes(w["nbytes"]),
            "-" if w["of_broadcast"] is None else f"{100 * w['of_broadcast']:.1f}%",
            f"{w['pulls']:,}",
            str(w["streams"]),
            human_bytes(w["receive_pool_nbytes"]),
            f"{w['scatters']:,}",
            f"{w['parameters']:,}",
        ]
        for numbers, w in collapse(summary["workers"], "consumer")
    ]
    heads = ["worker", "pulled", "of model", "pulls", "streams", "pool", "scatters", "params"]
    return table("workers", heads, rows, width)


def _rank_table(summary: dict[str, Any], width: int) -> list[str]:
    rows = [
        [
            ranges(numbers),
            human_bytes(r["nbytes"]),
            f"{r['of_mean']:.2f}x",
            f"{r['pulls']:,}",
            human_bytes(r["serve_ring_nbytes"]),
            human_bytes(r["resident_gather_nbytes"]),
        ]
        for numbers, r in collapse(summary["trainer_ranks"], "rank")
    ]
    heads = ["rank", "served", "of mean", "pulls", "serve rings", "resident gather"]
    return table("trainer ranks", heads, rows, width)


def _chunk_table(chunks: dict[str, Any], width: int) -> list[str]:
    total = sum(b["nbytes"] for b in chunks["buckets"])
    rows = [
        [
            f"to {human_bytes(b['up_to'])}",
            f"{b['chunks']:,}",
            human_bytes(b["nbytes"]),
            f"{100 * b['nbytes'] / total if total else 0:.1f}%",
            bar(b["chunks"] / chunks["count"]),
        ]
        for b in chunks["buckets"]
    ]
    title = (
        f"chunks: {chunks['count']:,}, median {human_bytes(chunks['median'])}, largest {human_bytes(chunks['largest'])}"
    )
    return table(title, ["packed", "chunks", "bytes", "of bytes", "share of chunks"], rows, width, graphs=(4,))


def collapse(rows: list[dict[str, Any]], key: str) -> list[tuple[list[int], dict[str, Any]]]:
    """Rows that differ in nothing but their number, in order of the first."""
    found: dict[str, tuple[list[int], dict[str, Any]]] = {}
    for row in rows:
        rest = repr({k: v for k, v in row.items() if k != key})
        found.setdefault(rest, ([], row))[0].append(row[key])
    return list(found.values())
