"""The ranks of an engine together: what no single worker's plan can show.

Every worker can be complete, and every source consumed by somebody, while a rank holds what is another's: two
tensor-parallel ranks that both take shard 0 are covered up by the data-parallel copy that takes shard 1. So the copies
of all workers of an engine are laid side by side. For one source and one place of one parameter:

- the ranks load a parameter from the same sources, or each from its own experts; they put them in the same places, and
  compute with the same operations (RDT336);
- what they take is equal or disjoint, every part is taken by equally many ranks, and in rank order (RDT335);
- parameters that take of the same source take the same of it or nothing of what the other takes (RDT335).

Replicas run one plan (RDT334), and a plan moves something (RDT337). Which expert is whose, and what an engine without
ranks does with its weights, cannot be told from the plan alone: that takes the loaders (`rdtplan.verify.loaders`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise, zip_longest
from math import prod

from attrs import frozen

from rdtplan.ir.dtypes import itemsize
from rdtplan.ir.manifest import Ints
from rdtplan.ir.pieces import whole_of
from rdtplan.ir.plan import ConsumerPlan, FleetPlan, Program
from rdtplan.ir.regions import Region, canonical, refine, span
from rdtplan.ir.topology import Position
from rdtplan.verify.coverage import Prover
from rdtplan.verify.findings import Finding

MOST_RUNS = 1 << 16
"""Contiguous runs of a source in a parameter that are looked at one by one, where slices were cut."""

Copy = tuple[str, str, str, Region, Region]
"""(parameter, source name, dtype in which it is read, region of the source, region of the parameter)."""


@frozen(slots=True)
class _Taken:
    """One copy of one worker, at a place of a parameter that other workers may have too."""

    worker: int
    position: Position
    source: Region
    dest: Region


def check_ranks(plan: FleetPlan, prover: Prover) -> list[Finding]:
    """Findings about the workers of a fleet side by side; each of them is sound by itself."""
    if not any(plan.overview.pulled_nbytes):
        return [Finding("RDT337", "the plan moves nothing: no worker pulls a byte", ("overview.pulled_nbytes",))]
    engine = plan.consumers[: plan.topology.workers_per_replica]
    findings = _check_replicas(plan.consumers, len(engine))
    if len(engine) == 1:
        return findings
    findings += _check_operations(engine)
    operands = {n for w in engine for n in w.program.parameters.names[w.program.parameters.held :]}
    copies = Copies(plan)
    slotted = {
        w.program.parameters.names[row] for w in engine for row in w.program.experts.parameters
    }  # expert by expert: rdtplan.verify.experts
    sharing: dict[tuple[str, str, str], dict[int, list[_Taken]]] = {}
    for worker in engine:
        for parameter, source, dtype, taken, dest in copies.of(worker.program):
            if parameter in slotted:
                continue
            row = _Taken(worker.consumer_id, worker.position, taken, dest)
            sharing.setdefault((source, dtype, parameter), {}).setdefault(worker.consumer_id, []).append(row)
    findings += _check_sources(sharing)
    return findings + _check_places(sharing, copies.cut, prover) + _check_parameters(sharing, operands, copies, prover)


# -- copies ------------------------------------------------------------------------------------------------------


class Copies:
    """The copies of programs as loaders made them: pieces put together again, and so are slices that were cut."""

    def __init__(self, plan: FleetPlan) -> None:
        self._manifest = plan.manifest
        self._found: dict[int, list[Copy]] = {}
        self.wholes: list[tuple[str, int] | None] = []
        """A source: the tensor that it is a piece of and the first of its elements; None: not cut by rows."""
        self.numel: dict[str, int] = {}
        self.dtypes: dict[str, str] = {}
        for k, name in enumerate(plan.manifest.names):
            whole = whole_of(name, plan.manifest.shape(k))
            self.wholes.append(whole)
            if whole is not None:
                self.dtypes[whole[0]] = plan.manifest.dtype(k)
                self.numel[whole[0]] = max(self.numel.get(whole[0], 0), whole[1] + prod(plan.manifest.shape(k)))
        parted = any(w is None or w[0] != n for w, n in zip(self.wholes, plan.manifest.names, strict=True))
        self.cut = bool(plan.settings.max_chunk_bytes) or parted

    def of(self, program: Program) -> list[Copy]:
        found = self._found.get(id(program))
        if found is None:
            found = self._found[id(program)] = self._read(program)
        return found

    def _read(self, program: Program) -> list[Copy]:
        keys, scatters, names = program.keys, program.scatters, program.parameters.names
        rows: list[Copy] = []
        for key, parameter, dest in zip(scatters.key, scatters.parameter, scatters.region, strict=True):
            whole = self.wholes[keys.source[key]]
            if whole is None:
                continue
            dtype, region = program.dtype_table[keys.dtype[key]], program.regions[keys.region[key]]
            if whole[1]:
                first = whole[1] * itemsize(self._manifest.dtype(keys.source[key])) // itemsize(dtype)
                region = Region(region.shape, region.stride, region.offset + first)
            rows.append((names[parameter], whole[0], dtype, region, program.regions[dest]))
        return _together(rows) if self.cut else rows


def _together(rows: list[Copy]) -> list[Copy]:
    """Copies of one source into one parameter, joined where the next goes on where the last one ended."""
    found: dict[tuple[str, str, str], list[tuple[Region, Region]]] = {}
    for parameter, source, dtype, taken, dest in rows:
        found.setdefault((parameter, source, dtype), []).append((taken, dest))
    out: list[Copy] = []
    for (parameter, source, dtype), pairs in found.items():
        before = 0
        while before != len(pairs):
            before = len(pairs)
            joined = pairs[:1]
            for pair in pairs[1:]:
                both = _join(joined[-1], pair)
                if both is None:
                    joined.append(pair)
                else:
                    joined[-1] = both
            pairs = joined
        out += [(parameter, source, dtype, taken, dest) for taken, dest in pairs]
    return out


def _join(a: tuple[Region, Region], b: tuple[Region, Region]) -> tuple[Region, Region] | None:
    """One copy that does what `a` and then `b` do, None when none is found.

    >>> rows = (Region((8,), (1,), 0), Region((2, 4), (6, 1), 0)), (Region((4,), (1,), 8), Region((4,), (1,), 12))
    >>> [str(r) for r in _join(*rows)]
    ['[shape (12,) stride (1,) offset 0]', '[shape (3, 4) stride (6, 1) offset 0]']
    """
    (shape, sa, da), (more, sb, db) = refine(*a), refine(*b)
    by = b[0].offset - a[0].offset, b[1].offset - a[1].offset
    if (shape, sa, da) == (more, sb, db) and min(by) > 0:  # two equal copies, one behind the other
        return _region((2, *shape), (by[0], *sa), a[0]), _region((2, *shape), (by[1], *da), a[1])
    if shape and (shape[1:], sa[1:], da[1:]) == (more, sb, db) and by == (shape[0] * sa[0], shape[0] * da[0]):
        return _region((shape[0] + 1, *more), sa, a[0]), _region((shape[0] + 1, *more), da, a[1])
    if more and (shape, sa, da) == (more[1:], sb[1:], db[1:]) and by == (sb[0], db[0]):
        return _region((more[0] + 1, *shape), sb, a[0]), _region((more[0] + 1, *shape), db, a[1])
    if shape and (shape[1:], sa, da) == (more[1:], sb, db) and by == (shape[0] * sa[0], shape[0] * da[0]):
        return _region((shape[0] + more[0], *shape[1:]), sa, a[0]), _region((shape[0] + more[0], *shape[1:]), da, a[1])
    return None


def _region(shape: Ints, stride: Ints, first: Region) -> Region:
    return canonical(shape, stride, first.offset)


# -- the rules ---------------------------------------------------------------------------------------------------


def _check_replicas(consumers: Sequence[ConsumerPlan], width: int) -> list[Finding]:
    findings = []
    for worker in consumers[width:]:
        first = consumers[worker.consumer_id % width]
        for field in ("program", "routing"):
            ours, theirs = getattr(worker, field), getattr(first, field)
            if ours is not theirs and ours != theirs:
                sentence = (
                    f"consumers[{worker.consumer_id}].{field}: it is not that of worker {first.consumer_id}, which has "
                    "the same place in the first replica"
                )
                findings.append(Finding("RDT334", sentence, (field,)))
    return findings


def _check_operations(engine: Sequence[ConsumerPlan]) -> list[Finding]:
    """Workers that hold a parameter compute it alike."""
    seen: dict[str, tuple[int, list[tuple[str, ...]]]] = {}
    findings = []
    done: set[int] = set()
    for worker in engine:
        program = worker.program
        if id(program) in done:
            continue
        done.add(id(program))
        computed: dict[str, list[tuple[str, ...]]] = {
            n: [] for n in program.parameters.names[: program.parameters.held]
        }
        for row, expression in zip(program.operations.parameters, program.operations.expressions, strict=True):
            nodes = tuple(node.op for node in program.expressions[expression].nodes)
            computed[program.parameters.names[row]].append(nodes)
        for name, operations in computed.items():
            first, wanted = seen.setdefault(name, (worker.consumer_id, operations))
            if operations != wanted:
                a, b = next((a, b) for a, b in zip_longest(wanted, operations) if a != b)
                said, has = (" ".join(x) if x else "nothing" for x in (a, b))
                sentence = f"{name!r} is computed by {said} on worker {first}, by {has} on worker {worker.consumer_id}"
                findings.append(Finding("RDT336", sentence, (name,)))
    return findings


def _check_sources(sharing: dict[tuple[str, str, str], dict[int, list[_Taken]]]) -> list[Finding]:
    """Workers load a parameter from the same sources, or each from sources that no other worker takes (its experts)."""
    takers: dict[str, set[int]] = {}
    loaded: dict[str, dict[int, list[str]]] = {}
    for (source, _, parameter), by_worker in sharing.items():
        takers.setdefault(source, set()).update(by_worker)
        for worker in by_worker:
            loaded.setdefault(parameter, {}).setdefault(worker, []).append(source)
    findings = []
    for parameter, sources in loaded.items():
        (first, wanted), *others = sources.items()
        expected = set(wanted)
        for worker, found in others:
            if expected == set(found):
                continue
            shared = [s for s in (*wanted, *found) if len(takers[s]) > 1]
            if shared:
                a = next((s for s in wanted if s not in found), "")
                b = next((s for s in found if s not in expected), "")
                said, has = (repr(x) if x else "no such source" for x in (a, b))
                sentence = f"{parameter!r}: worker {first} loads it from {said}, worker {worker} from {has}"
                findings.append(Finding("RDT336", sentence, (parameter, *(x for x in (a, b) if x))))
                break
    return findings


def _check_places(
    sharing: dict[tuple[str, str, str], dict[int, list[_Taken]]], cut: bool, prover: Prover
) -> list[Finding]:
    findings: list[Finding] = []
    sound: set[tuple[tuple[_Taken, ...], ...]] = set()
    for (source, _, parameter), by_worker in sharing.items():
        if len(by_worker) < 2:
            continue
        shape = tuple(tuple(rows) for rows in by_worker.values())
        if shape in sound:  # layers and experts repeat
            continue
        problem = _misplaced(by_worker) or _untiled(by_worker, prover)
        if problem is not None and cut:  # it may be cut and joined in other places on other ranks
            problem = _shared_unevenly(by_worker)
        if problem is None:
            sound.add(shape)
        else:
            code, what = problem
            findings.append(Finding(code, f"{source!r} into {parameter!r}: {what}", (source, parameter)))
    return findings


def _misplaced(by_worker: dict[int, list[_Taken]]) -> tuple[str, str] | None:
    """Ranks put a source where the first of them puts it; one at the end of a vocabulary may have less of it."""
    rows = list(by_worker.values())
    for other in rows[1:]:
        for a, b in zip_longest(rows[0], other):
            if a is None or b is None or not _same_place(a.dest, b.dest):
                said, has = (_range(x.dest) if x else "no more" for x in (a, b))
                return "RDT336", f"worker {rows[0][0].worker} writes {said} of it, worker {other[0].worker} {has}"
    return None


def _same_place(a: Region, b: Region) -> bool:
    """Two regions that begin and step alike, though one may end sooner."""
    n = min(len(a.stride), len(b.stride))
    return a.offset == b.offset and a.stride[len(a.stride) - n :] == b.stride[len(b.stride) - n :]


def _untiled(by_worker: dict[int, list[_Taken]], prover: Prover) -> tuple[str, str] | None:
    """At each place, ranks take the same or apart; every part equally often; in rank order."""
    for rows in zip(*by_worker.values(), strict=True):
        counts = Counter(row.source for row in rows)
        if len(counts) == 1:
            continue
        holder = {row.source: row.worker for row in reversed(rows)}
        for a, b in combinations(counts, 2):
            if prover.overlap(a, b):
                return "RDT335", (
                    f"workers {holder[a]} and {holder[b]} take parts that overlap and are not the same, "
                    f"{_range(a)} and {_range(b)}"
                )
        (most, n), (least, m) = counts.most_common()[0], counts.most_common()[-1]
        if n != m:
            return "RDT335", (
                f"{_range(most)} are taken by {n} workers (worker {holder[most]} is one), "
                f"{_range(least)} by {m} (worker {holder[least]})"
            )
        stages: dict[tuple[int, int], list[_Taken]] = {}
        for row in rows:
            stages.setdefault((row.position.dp, row.position.pp), []).append(row)
        for ranks in stages.values():
            for a_row, b_row in pairwise(sorted(ranks, key=lambda row: row.position.tp)):
                if a_row.source.offset > b_row.source.offset:
                    return "RDT335", (
                        f"worker {a_row.worker} takes {_range(a_row.source)}, worker {b_row.worker}, a later rank, "
                        f"{_range(b_row.source)}: ranks take their shards in order"
                    )
    return None


Run = tuple[int, int, int]
"""(first element of the parameter, first element of the source, elements)."""


def _shared_unevenly(by_worker: dict[int, list[_Taken]]) -> tuple[str, str] | None:
    """`_misplaced` and `_untiled`, element by element: for copies that were cut, at borders that need not be alike.

    An element is put in the same place by all who take it; what is put in one place is taken by equally many workers
    and in rank order; a worker may lack the end. None too when there are more than MOST_RUNS runs to look at.
    """
    runs: dict[int, list[Run]] = {}
    for worker, rows in by_worker.items():
        found = _runs(rows)
        if found is None:
            return None
        runs[worker] = found
    active: list[tuple[int, int, int]] = []
    for source, dest, n, worker in sorted((s, d, n, w) for w, found in runs.items() for d, s, n in found):
        active = [x for x in active if x[0] > source]
        other = next((w for _, shift, w in active if shift != dest - source and w != worker), None)
        if other is not None:
            return "RDT336", f"workers {other} and {worker} put element {source} of it in different places"
        active.append((source + n, dest - source, worker))
    borders = sorted({at for found in runs.values() for d, _, n in found for at in (d, d + n)})
    cut = {worker: dict(_cut(found, borders)) for worker, found in runs.items()}
    gone: set[int] = set()
    position = {worker: rows[0].position for worker, rows in by_worker.items()}
    for dest in borders[:-1]:
        here = {worker: pieces[dest] for worker, pieces in cut.items() if dest in pieces}
        if not here:
            continue
        back = gone & set(here)
        if back:
            return "RDT336", f"worker {min(back)} leaves out what comes before element {dest}"
        gone |= set(cut) - set(here)
        counts = Counter(here.values())
        (most, n), (least, m) = counts.most_common()[0], counts.most_common()[-1]
        if n != m and not gone:
            return "RDT335", f"element {most} is taken by {n} workers, element {least}, for the same place, by {m}"
        ranks = sorted((p.dp, p.pp, p.tp, here[worker], worker) for worker, p in position.items() if worker in here)
        for x, y in pairwise(ranks):
            if x[:2] == y[:2] and x[3] > y[3]:
                return "RDT335", (
                    f"worker {x[4]} takes element {x[3]}, worker {y[4]}, a later rank, element {y[3]} for one place"
                )
    return None


def _runs(rows: list[_Taken]) -> list[Run] | None:
    return runs_of((row.source, row.dest) for row in rows)


def runs_of(copies: Iterable[tuple[Region, Region]]) -> list[Run] | None:
    """Copies (region of the source, region of the parameter) as runs that are contiguous on both sides, joined where
    they go on; None: too many."""
    runs: list[Run] = []
    for taken, place in copies:
        shape, source, dest = refine(taken, place)
        whole = bool(shape) and source[-1] == dest[-1] == 1
        outer, n = (shape[:-1], shape[-1]) if whole else (shape, 1)
        if prod(outer) > MOST_RUNS or len(runs) > MOST_RUNS:
            return None
        starts = [(place.offset, taken.offset)]
        for size, by, to in zip(outer, source, dest, strict=False):
            starts = [(d + i * to, s + i * by) for d, s in starts for i in range(size)]
        runs += [(d, s, n) for d, s in starts]
    joined: list[Run] = []
    for d, s, n in sorted(runs):
        if joined and (d, s) == (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]):
            joined[-1] = (*joined[-1][:2], joined[-1][2] + n)
        else:
            joined.append((d, s, n))
    return joined


def _cut(runs: list[Run], borders: list[int]) -> Iterator[tuple[int, int]]:
    """(element of the parameter, element of the source) at every border inside a run."""
    for d, s, n in runs:
        for at in borders[bisect_left(borders, d) : bisect_left(borders, d + n)]:
            yield at, s + at - d


def _check_parameters(
    sharing: dict[tuple[str, str, str], dict[int, list[_Taken]]], operands: set[str], copies: Copies, prover: Prover
) -> list[Finding]:
    """A tensor that goes to several parameters: all that each takes of it is the same, or apart.

    Operations may read what they like: operands are left out.
    """
    users: dict[tuple[str, str], list[str]] = {}
    for source, dtype, parameter in sharing:
        users.setdefault((source, dtype), []).append(parameter)
    findings = []
    for (source, dtype), parameters in users.items():
        parameters = [p for p in parameters if p not in operands]
        if len(parameters) < 2 or copies.dtypes[source] != dtype:
            continue
        extent = canonical((copies.numel[source],), (1,), 0)
        unions = {p: _union(sharing[source, dtype, p].values()) for p in parameters}
        for a, b in combinations(parameters, 2):
            if unions[a] == unions[b]:
                continue
            missing = [prover.cover(extent, x).missing for x in (unions[a], unions[b], (*unions[a], *unions[b]))]
            apart = extent.numel - missing[0] + extent.numel - missing[1] == extent.numel - missing[2]
            if not apart and not missing[0] == missing[1] == missing[2]:
                sentence = f"{a!r} and {b!r} take parts of {source!r} that overlap and are not the same"
                findings.append(Finding("RDT335", sentence, (source, a, b)))
    return findings


def _union(rows: Iterable[list[_Taken]]) -> tuple[Region, ...]:
    return tuple(dict.fromkeys(row.source for taken in rows for row in taken))


def _range(region: Region) -> str:
    lo, hi = span(region)
    return f"elements {lo} to {hi}" if region.numel == hi - lo else f"{region.numel} elements in {lo} to {hi}"
