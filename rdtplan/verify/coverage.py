"""Completeness: every destination element is written exactly once, every source element is consumed.

Proved by region arithmetic over runs. Layers, experts and ranks repeat the same shapes, so each distinct
question is answered once.
"""

from __future__ import annotations

from collections.abc import Sequence

from rdtplan.ir.dtypes import itemsize
from rdtplan.ir.manifest import Manifest
from rdtplan.ir.plan import Program
from rdtplan.ir.regions import Coverage, Region, canonical, contiguous_stride, cover, overlap, run_count
from rdtplan.verify.findings import Finding

MAX_RUNS = 1 << 24
"""Contiguous runs in one question. A fused expert weight of 128 experts, cut by columns for TP8, has 4 million."""
MAX_RUNS_TOGETHER = 1 << 26
"""Contiguous runs in all questions about one plan, repeated questions counted once."""


class TooScattered(Exception):
    """A question that no loader gives rise to, and that would take all time or memory to answer."""


class Prover:
    """Answers coverage questions and remembers them. Raises TooScattered when they ask for too much."""

    def __init__(self) -> None:
        self._known: dict[tuple[Region, tuple[Region, ...]], Coverage] = {}
        self._shared: dict[tuple[Region, Region], bool] = {}
        self._runs = 0

    def cover(self, extent: Region, regions: tuple[Region, ...]) -> Coverage:
        key = (extent, regions)
        found = self._known.get(key)
        if found is None:
            self._spend(run_count(extent) + sum(map(run_count, regions)))
            found = self._known[key] = cover(extent, regions)
        return found

    def overlap(self, a: Region, b: Region) -> bool:
        """Do two regions share an element?"""
        found = self._shared.get((a, b))
        if found is None:
            self._spend(run_count(a) + run_count(b))
            found = self._shared[a, b] = overlap(a, b)
        return found

    def _spend(self, runs: int) -> None:
        self._runs += runs
        if runs > MAX_RUNS or self._runs > MAX_RUNS_TOGETHER:
            raise TooScattered(f"{runs:,} separate pieces, more than can be checked")


def check_destinations(program: Program, prover: Prover, where: str) -> list[Finding]:
    """Findings about the memory of one worker: gaps, double writes, writes outside, reads of what nobody wrote.

    Operations come after all copies and constants. One that reads what it overwrites (`param.copy_(fn(param))`) is a
    rewrite and counts for nothing; any other is a write like a copy.
    """
    p = program.parameters
    fetched: list[list[Region]] = [[] for _ in range(len(p))]
    filled: list[list[Region]] = [[] for _ in range(len(p))]
    late: list[list[Region]] = [[] for _ in range(len(p))]
    for parameter, region in zip(program.scatters.parameter, program.scatters.region, strict=True):
        fetched[parameter].append(program.regions[region])
    for parameter, region, before in zip(
        program.fills.parameters, program.fills.regions, program.fills.before, strict=True
    ):
        filled[parameter].append(program.regions[region])
        if not before:
            late[parameter].append(program.regions[region])
    findings: list[Finding] = []
    _add_operations(program, prover, where, fetched, filled, findings)
    for k, name in enumerate(p.names):
        extent = canonical(p.shapes[k], p.strides[k], 0)
        if not fetched[k] and not filled[k]:
            if extent.numel and p.kinds[k] != "buffer":
                findings.append(Finding("RDT310", f"{where}: no loader writes {p.kinds[k]} {name!r}", (name,)))
            continue
        by_fetch = prover.cover(extent, tuple(fetched[k]))
        both = prover.cover(extent, (*fetched[k], *filled[k])) if filled[k] else by_fetch
        overlap = by_fetch.first_overlap
        if overlap is None and late[k]:
            overlap = prover.cover(extent, (*fetched[k], *late[k])).first_overlap
        if both.out_of_bounds:
            lo, hi = both.out_of_bounds
            findings.append(
                Finding(
                    "RDT313",
                    f"{where}: a write into {name!r} spans elements {lo} to {hi}, it has {extent.numel}",
                    (name,),
                )
            )
        elif overlap:
            findings.append(
                Finding(
                    "RDT312",
                    f"{where}: elements {overlap[0]} to {overlap[1]} of {name!r} are written twice",
                    (name,),
                )
            )
        if both.missing:
            gap = both.first_gap or (0, 0)
            findings.append(
                Finding(
                    "RDT311",
                    f"{where}: {both.missing} of {extent.numel} elements of {name!r} are never written, "
                    f"the first at {gap[0]} to {gap[1]}",
                    (name,),
                )
            )
    return findings


def _add_operations(
    program: Program,
    prover: Prover,
    where: str,
    fetched: list[list[Region]],
    filled: list[list[Region]],
    findings: list[Finding],
) -> None:
    """Count every operation that is no rewrite among the copies, in record order; find reads of unwritten memory."""
    p, operations, leaves = program.parameters, program.operations, program.leaves
    start = 0
    for k, end in enumerate(operations.leaf_end):
        row, region = operations.parameters[k], program.regions[operations.regions[k]]
        own: list[Region] = []
        for at in range(start, end):
            leaf, read = leaves.rows[at], program.regions[leaves.regions[at]]
            if leaf == row:
                own.append(read)
            if prover.cover(read, (*fetched[leaf], *filled[leaf])).missing:
                sentence = f"{where}: {p.names[row]!r} is computed from elements of {p.names[leaf]!r} not yet written"
                findings.append(Finding("RDT315", sentence, (p.names[row], p.names[leaf])))
        start = end
        if not own or prover.cover(region, tuple(own)).missing:
            fetched[row].append(region)


def check_sources(
    manifest: Manifest, programs: Sequence[Program], prover: Prover, *, tied_head: bool = False
) -> list[Finding]:
    """Findings about the sources of the whole fleet: names and elements without consumer, reads outside.

    `tied_head` says that the model computes logits with its embedding, whatever the trainer calls the head.
    """
    used: list[dict[Region, None]] = [{} for _ in range(len(manifest))]
    retyped: dict[int, dict[Region, None]] = {}
    for program in programs:
        keys = program.keys
        for source, region, dtype in zip(keys.source, keys.region, keys.dtype, strict=True):
            if program.dtype_table[dtype] == manifest.dtype(source):
                used[source][program.regions[region]] = None
            else:
                size = itemsize(program.dtype_table[dtype])
                retyped.setdefault(source, {})[in_bytes(program.regions[region], size)] = None
    extents = [canonical(s, contiguous_stride(s), 0) for s in manifest.shape_table]
    findings: list[Finding] = []
    tied = {alias: p.names[k] for p in (x.parameters for x in programs) for k, a in enumerate(p.aliases) for alias in a}
    for k, name in enumerate(manifest.names):
        if not used[k] and k not in retyped and extents[manifest.shapes[k]].numel:
            other = next((alias for alias in tied if _same_name(alias, name)), None)
            if other is not None or (tied_head and _same_name("lm_head.weight", name)):
                sentence = f"source name {name!r} goes nowhere: the model ties " + (
                    f"{other!r} to {tied[other]!r}, which is sent by its own name"
                    if other
                    else "its head to its embedding"
                )
                findings.append(Finding("RDT322", sentence, (name,), "note"))
                continue
            sentence = f"source name {name!r} is taken by no loader of any worker"
            findings.append(Finding("RDT320", sentence, (name,)))
    for k, name in enumerate(manifest.names):
        extent, unit = extents[manifest.shapes[k]], "elements"
        regions = tuple(used[k])
        if k in retyped:
            size, unit = itemsize(manifest.dtype(k)), "bytes"
            extent = in_bytes(extent, size)
            regions = (*(in_bytes(r, size) for r in regions), *retyped[k])
        if not regions:
            continue
        covered = prover.cover(extent, regions)
        if covered.out_of_bounds:
            lo, hi = covered.out_of_bounds
            sentence = f"a read of {name!r} spans {unit} {lo} to {hi}, it has {extent.numel}"
            findings.append(Finding("RDT314", sentence, (name,)))
        if covered.missing:
            lo, hi = covered.first_gap or (0, 0)
            sentence = (
                f"{covered.missing} of {extent.numel} {unit} of source {name!r} reach no worker, "
                f"the first at {lo} to {hi}"
            )
            findings.append(Finding("RDT321", sentence, (name,)))
    return findings


def _same_name(a: str, b: str) -> bool:
    """Do two dotted names mean one tensor, one of them seen from further outside?"""
    return a == b or a.endswith(f".{b}") or b.endswith(f".{a}")


def in_bytes(region: Region, size: int) -> Region:
    """The bytes of a region whose elements have `size` bytes, as a region of bytes."""
    return canonical((*region.shape, size), (*(s * size for s in region.stride), 1), region.offset * size)
