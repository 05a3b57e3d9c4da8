"""`rdtplan inspect` from near by: one worker, one producer, one gather group, one chunk."""

from __future__ import annotations

from collections import Counter
from difflib import get_close_matches
from typing import Any

from rdtplan.errors import InputError
from rdtplan.ir.file import PlanFile
from rdtplan.ir.plan import ConsumerPlan, GatherGroup
from rdtplan.report.inspect import collapse
from rdtplan.report.memory import parameters_nbytes
from rdtplan.report.names import brief, fold_names, names_text, patterns_text
from rdtplan.report.tables import paragraph, table
from rdtplan.report.units import human_bytes, numbered, plural, ranges
from rdtplan.report.writes import describe, fold


def workers_of(file: PlanFile) -> list[ConsumerPlan]:
    """All consumer plans. Workers that share a program share the object."""
    return [file.consumer(c) for c in range(file.field("topology").workers)]


def _within(option: str, things: str, number: int, count: int, whose: str = "the plan") -> int:
    """The number itself. InputError RDT108 when there is no such thing."""
    if 0 <= number < count:
        return number
    has = f"has {things} 0 to {count - 1}" if count else f"has no {things}"
    raise InputError(f"{option} {number}: {whose} {has}", code="RDT108")


def worker(file: PlanFile, number: int) -> dict[str, Any]:
    """What one worker pulls, from whom, and where it goes."""
    me = file.consumer(_within("--worker", "workers", number, file.field("topology").workers))
    program, groups = me.program, file.field("groups")
    chunks, routing = program.chunks, me.routing
    alike = [c.consumer_id for c in workers_of(file) if c.program is program]
    from_rank: dict[int, Counter[str]] = {}
    for producer, nbytes in zip(routing.producer, chunks.nbytes, strict=True):
        from_rank.setdefault(producer, Counter()).update(pulls=1, nbytes=nbytes)
    return {
        "consumer": number,
        "replica": me.replica,
        "position": str(me.position),
        "digest": me.digest,
        "runs_the_program_of": alike,
        "nbytes": sum(chunks.nbytes),
        "pulls": len(chunks),
        "streams": len(set(chunks.stream)),
        "slices": len(program.keys),
        "scatters": len(program.scatters),
        "fills": len(program.fills),
        "parameters": len(program.parameters),
        "parameters_nbytes": parameters_nbytes(program.parameters),
        "modules": len(program.lifetimes.module),
        "untouched": len(program.untouched),
        "receive_pool_nbytes": file.field("memory").receive_pool_nbytes[number],
        "producers": [{"rank": r, **from_rank[r]} for r in sorted(from_rank)],
        "chunks": [
            {
                "chunk": k,
                "group": groups[chunks.group[k]].label,
                "stream": chunks.stream[k],
                "producer": routing.producer[k],
                "seq": routing.seq[k],
                "nbytes": chunks.nbytes[k],
                "slices": chunks.key_end[k] - (chunks.key_end[k - 1] if k else 0),
            }
            for k in range(len(chunks))
        ],
    }


def render_worker(w: dict[str, Any], width: int) -> list[str]:
    others = [c for c in w["runs_the_program_of"] if c != w["consumer"]]
    lines = paragraph(
        f"worker {w['consumer']} ({w['position']}, replica {w['replica']}): {human_bytes(w['nbytes'])} in "
        f"{plural(w['pulls'], 'pull')} of {plural(w['slices'], 'slice')}, {plural(w['streams'], 'stream')}",
        width,
        2,
    )
    lines += paragraph(
        f"  writes {w['scatters']:,} times, fills {plural(w['fills'], 'region')}, completes "
        f"{plural(w['modules'], 'module')}; {plural(w['parameters'], 'parameter')} and buffers "
        f"({human_bytes(w['parameters_nbytes'])}); {plural(w['untouched'], 'name')} that no loader writes; "
        f"receive pool {human_bytes(w['receive_pool_nbytes'])}",
        width,
        2,
    )
    if others:
        lines += paragraph(f"  same program: {numbered('worker', others)}", width, 4)
    rows = [[str(p["rank"]), f"{p['pulls']:,}", human_bytes(p["nbytes"])] for p in w["producers"]]
    lines += ["", *table("pulled from", ["rank", "pulls", "bytes"], rows, width)]
    runs = _chunk_runs(w["chunks"])
    rows = [
        [
            ranges(r["chunks"]),
            names_text(r["groups"]),
            ranges(r["streams"]),
            ranges(r["producers"]),
            human_bytes(r["nbytes"]),
            f"{r['slices']:,}",
        ]
        for r in runs
    ]
    heads = ["chunk", "group", "stream", "producer", "packed each", "slices each"]
    return [*lines, "", *table("chunks in issue order", heads, rows, width, text=(0, 1))]


def _kind(label: str) -> str:
    """What groups that are lines of one table have in common: the label without a number at its end."""
    stem, _, last = label.rpartition(".")
    return stem if last.isdigit() else label


def _chunk_runs(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chunks of one kind of group, size and count of slices, in order of the first."""
    found: dict[Any, dict[str, Any]] = {}
    for c in chunks:
        key = (_kind(c["group"]), c["nbytes"], c["slices"])
        run = found.setdefault(
            key,
            {
                "chunks": [],
                "groups": [],
                "streams": set(),
                "producers": set(),
                "nbytes": c["nbytes"],
                "slices": c["slices"],
            },
        )
        run["chunks"].append(c["chunk"])
        run["groups"].append(c["group"])
        run["streams"].add(c["stream"])
        run["producers"].add(c["producer"])
    return list(found.values())


def producer(file: PlanFile, rank: int) -> dict[str, Any]:
    """What one trainer rank publishes and serves."""
    me = file.producer(_within("--producer", "trainer ranks", rank, file.field("ownership").ranks))
    groups, memory = file.field("groups"), file.field("memory")
    servings = []
    for s in me.servings:
        nbytes = file.table(s.consumer_id, "chunks").nbytes
        servings.append(
            {
                "consumer": s.consumer_id,
                "pulls": len(s.chunks),
                "nbytes": sum(nbytes[c] for c in s.chunks),
                "slot_nbytes": s.slot_nbytes,
            }
        )
    return {
        "rank": rank,
        "groups": [
            {"group": g, "label": groups[g].label, "nbytes": n, "of_nbytes": groups[g].nbytes, "signals": signals}
            for g, n, signals in zip(me.groups, me.group_nbytes, me.signals, strict=True)
        ],
        "owned_nbytes": sum(me.group_nbytes),
        "served_nbytes": sum(s["nbytes"] for s in servings),
        "served_pulls": sum(s["pulls"] for s in servings),
        "servings": servings,
        "serve_ring_nbytes": memory.serve_ring_nbytes[rank],
        "resident_gather_nbytes": memory.resident_gather_nbytes[rank],
    }


def render_producer(p: dict[str, Any], width: int) -> list[str]:
    lines = paragraph(
        f"trainer rank {p['rank']}: owns {human_bytes(p['owned_nbytes'])} in {plural(len(p['groups']), 'group')}, "
        f"serves {human_bytes(p['served_nbytes'])} in {plural(p['served_pulls'], 'pull')}",
        width,
        2,
    )
    lines += paragraph(
        f"  serve rings {human_bytes(p['serve_ring_nbytes'])}, resident gather "
        f"{human_bytes(p['resident_gather_nbytes'])}",
        width,
        2,
    )
    rows = [
        [ranges(numbers), f"{s['pulls']:,}", human_bytes(s["nbytes"]), human_bytes(s["slot_nbytes"])]
        for numbers, s in collapse(p["servings"], "consumer")
    ]
    lines += ["", *table("serves", ["worker", "pulls", "bytes each", "slot"], rows, width)]
    kinds: dict[Any, list[dict[str, Any]]] = {}
    for g in p["groups"]:
        kinds.setdefault((_kind(g["label"]), g["nbytes"], g["of_nbytes"], g["signals"]), []).append(g)
    rows = [
        [
            ranges([g["group"] for g in members]),
            names_text(g["label"] for g in members),
            human_bytes(members[0]["nbytes"]),
            f"{100 * members[0]['nbytes'] / max(1, members[0]['of_nbytes']):.0f}%",
            str(members[0]["signals"]),
        ]
        for members in kinds.values()
    ]
    heads = ["group", "label", "own bytes each", "of group", "signals"]
    return [*lines, "", *table("gathers and publishes, in order", heads, rows, width, text=(0, 1))]


def find_group(file: PlanFile, text: str) -> int:
    """Index of a gather group given by number or label. InputError RDT108 when there is none."""
    groups: tuple[GatherGroup, ...] = file.field("groups")
    for k, group in enumerate(groups):
        if text in (str(k), group.label):
            return k
    close = get_close_matches(text, [group.label for group in groups], 3)
    raise InputError(
        f"--group {text!r}: the plan has groups 0 to {len(groups) - 1}, such as {groups[len(groups) // 2].label!r}",
        fix=f"labels like it: {', '.join(close)}"
        if close
        else "give a number or a label that `rdtplan inspect --producer 0` shows",
        code="RDT108",
    )


def group(file: PlanFile, text: str) -> dict[str, Any]:
    """One gather group: its names, owners, and who pulls what of it."""
    k = find_group(file, text)
    groups, manifest, ownership = file.field("groups"), file.field("manifest"), file.field("ownership")
    g = groups[k]
    members = range(g.first, g.first + g.count)
    classes: dict[int, list[str]] = {}
    for i in members:
        classes.setdefault(ownership.class_of[i], []).append(manifest.names[i])
    pulls = []
    for c in workers_of(file):
        chunks = c.program.chunks
        mine = [i for i, of in enumerate(chunks.group) if of == k]
        pulls.append(
            {
                "consumer": c.consumer_id,
                "chunks": mine,
                "nbytes": sum(chunks.nbytes[i] for i in mine),
                "producers": sorted({c.routing.producer[i] for i in mine}),
                "frees_after_chunk": c.program.free_after[k],
            }
        )
    return {
        "group": k,
        "label": g.label,
        "nbytes": g.nbytes,
        "names": g.count,
        "owners": [
            {
                "ranks": list(ownership.classes[i]),
                "names": [{"pattern": f.pattern, "count": f.count} for f in fold_names(names)],
            }
            for i, names in classes.items()
        ],
        "workers": pulls,
    }


def render_group(g: dict[str, Any], width: int) -> list[str]:
    head = f"group {g['group']}, {g['label']}: {plural(g['names'], 'name')}, {human_bytes(g['nbytes'])}"
    lines = paragraph(head, width, 2)
    rows = [
        [brief(n["pattern"]), f"{n['count']:,}", ranges(owner["ranks"])]
        for owner in g["owners"]
        for n in owner["names"]
    ]
    lines += ["", *table("names", ["source name", "count", "owners"], rows, width)]
    from_ranks = {w["consumer"]: w["producers"] for w in g["workers"]}
    rows = [
        [
            ranges(numbers),
            ranges(w["chunks"]) or "none",
            human_bytes(w["nbytes"]),
            ranges({r for c in numbers for r in from_ranks[c]}) or "-",
            "sync start" if w["frees_after_chunk"] < 0 else f"chunk {w['frees_after_chunk']}",
        ]
        for numbers, w in collapse([{**w, "producers": None} for w in g["workers"]], "consumer")
    ]
    heads = ["worker", "chunks", "bytes each", "from ranks", "freed after"]
    return [*lines, "", *table("pulled by", heads, rows, width)]


def chunk(file: PlanFile, consumer: int, number: int) -> dict[str, Any]:
    """One chunk of one worker: what it packs and where every slice goes. InputError RDT108 when there is none."""
    me = file.consumer(_within("--worker", "workers", consumer, file.field("topology").workers))
    manifest, program, chunks = file.field("manifest"), me.program, me.program.chunks
    _within("--chunk", "chunks", number, len(chunks), f"worker {consumer}")
    first = chunks.scatter_end[number - 1] if number else 0
    k = file.field("settings").num_rdt_buffers
    lines = fold(describe(me, manifest, range(first, chunks.scatter_end[number])))
    lifetimes = program.lifetimes
    names = program.parameters.module_names
    return {
        "consumer": consumer,
        "chunk": number,
        "group": file.field("groups")[chunks.group[number]].label,
        "owners": list(file.field("ownership").classes[chunks.owner_class[number]]),
        "stream": chunks.stream[number],
        "producer": me.routing.producer[number],
        "seq": me.routing.seq[number],
        "serve_slot": me.routing.seq[number] % k,
        "nbytes": chunks.nbytes[number],
        "materializes": [names[m] for m, c in zip(lifetimes.module, lifetimes.first, strict=True) if c == number],
        "completes": [names[m] for m, c in zip(lifetimes.module, lifetimes.last, strict=True) if c == number],
        "writes": [
            {
                "sources": [f.pattern for f in fold_names(w.sources)],
                "count": len(w.sources),
                "slice": w.slice,
                "parameter": w.parameter,
                "destination": w.destination,
                "nbytes": w.nbytes,
            }
            for w in lines
        ],
    }


def render_chunk(c: dict[str, Any], width: int) -> list[str]:
    lines = paragraph(
        f"chunk {c['chunk']} of worker {c['consumer']}: {human_bytes(c['nbytes'])} packed, group {c['group']}, stream "
        f"{c['stream']}, from rank {c['producer']} (of owners {ranges(c['owners'])}) as its pull {c['seq']}, "
        f"serve slot {c['serve_slot']}",
        width,
        2,
    )
    for what in ("materializes", "completes"):
        folded = names_text(c[what])
        lines += paragraph(f"  {what} {plural(len(c[what]), 'module')}: {folded}", width, 4) if folded else []
    rows = [
        [patterns_text(w["sources"], " "), w["slice"], f"{w['parameter']} {w['destination']}", human_bytes(w["nbytes"])]
        for w in c["writes"]
    ]
    return [*lines, "", *table("writes", ["source", "slice", "lands in", "bytes"], rows, width, text=(0, 1, 2))]
