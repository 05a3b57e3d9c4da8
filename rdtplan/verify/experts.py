"""The experts of an engine: every slot holds what the plan says, whichever worker it is on.

Ranks of expert parallelism take different sources, and with redundant experts some take the same, so the rules for
ranks that share a tensor do not hold for slots (`rdtplan.verify.ranks`). These do:

- all workers have one placement, and the slots of a parameter are dealt over the workers once, all of them;
- slots of one expert are loaded alike, down to the element: a replica that is not, answers for another expert (RDT338);
- slots of different experts have nothing in common (RDT338).

Which source is which expert's only the loaders know (`rdtplan.verify.loaders`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rdtplan.ir.experts import by_slot
from rdtplan.ir.plan import ConsumerPlan, FleetPlan
from rdtplan.ir.regions import Region
from rdtplan.verify.findings import Finding
from rdtplan.verify.ranks import Copies, runs_of

_Piece = tuple[str, str, Region, Region]
"""(source, dtype, region of the source, place in the slot)."""


def check_experts(plan: FleetPlan) -> list[Finding]:
    """Findings about the slots of an engine; each of its workers is sound by itself."""
    engine = plan.consumers[: plan.topology.workers_per_replica]
    findings = _check_placement(plan, engine)
    if findings or not any(w.program.experts.modules for w in engine):
        return findings
    copies = Copies(plan)
    held: dict[tuple[str, str], dict[int, list[_Piece]]] = {}
    for worker in engine:
        for key, slots in _slots(worker, copies).items():
            held.setdefault(key, {}).update(slots)
    placed = {m: row for worker in engine for m, row in worker.program.experts.rows().items()}
    for (module, parameter), slots in held.items():
        findings += _check_slots(parameter, placed[module], slots, copies.cut)
    return findings


def _check_placement(plan: FleetPlan, engine: Sequence[ConsumerPlan]) -> list[Finding]:
    """One placement for all, and every slot of every parameter on one worker."""
    findings: list[Finding] = []

    def wrong(worker: ConsumerPlan, field: str, what: str) -> None:
        where = f"consumers[{worker.consumer_id}].program.experts.{field}"
        findings.append(Finding("RDT330", f"{where}: {what}", (field,)))

    first: dict[str, tuple[int, ...]] = {}
    dealt: dict[str, list[tuple[int, int]]] = {}
    slots: dict[str, int] = {}
    for worker in engine:
        experts, parameters = worker.program.experts, worker.program.parameters
        redundant = plan.topology.redundant_experts
        if experts.modules and redundant is None:
            wrong(worker, "modules", "experts are placed, and the topology has no EPLB")
            return findings
        for layer, (module, row) in enumerate(experts.rows().items()):
            if len(row) - experts.logical[layer] != redundant:
                wrong(
                    worker, "slot_end", f"{module!r} has {len(row)} slots, not {experts.logical[layer]} + {redundant}"
                )
            if first.setdefault(module, row) != row:
                wrong(worker, "experts", f"{module!r} is placed otherwise than on the first worker that has it")
        for k, layer, at in zip(experts.parameters, experts.layers, experts.first, strict=True):
            name, whole, held = parameters.names[k], len(experts.placed(layer)), parameters.shapes[k][0]
            slots[name] = whole
            if held != whole:
                dealt.setdefault(name, []).append((at, at + held))
    for name, ranges in dealt.items():
        ends = [0, *(end for _, end in sorted(ranges))]
        if [at for at, _ in sorted(ranges)] != ends[:-1] or ends[-1] != slots[name]:
            what = f"plan: the slots of {name!r} are dealt as {sorted(ranges)}, they are 0 to {slots[name] - 1}"
            findings.append(Finding("RDT330", what, (name,)))
    return findings


def _slots(worker: ConsumerPlan, copies: Copies) -> dict[tuple[str, str], dict[int, list[_Piece]]]:
    """(layer, parameter) -> slot -> what goes into it."""
    program = worker.program
    experts, parameters = program.experts, program.parameters
    of = {
        parameters.names[row]: (experts.modules[layer], first, parameters.strides[row][0], parameters.shapes[row][0])
        for row, layer, first in zip(experts.parameters, experts.layers, experts.first, strict=True)
    }
    found: dict[tuple[str, str], dict[int, list[_Piece]]] = {
        (module, name): {first + slot: [] for slot in range(n)} for name, (module, first, _, n) in of.items()
    }
    for name, source, dtype, taken, dest in copies.of(program):
        if name in of:
            module, first, size, _ = of[name]
            for slot, a, b in by_slot(taken, dest, size):
                found[module, name][first + slot].append((source, dtype, a, b))
    return found


def _check_slots(parameter: str, placed: Sequence[int], slots: dict[int, list[_Piece]], cut: bool) -> list[Finding]:
    first: dict[int, int] = {}
    taken: dict[tuple[str, str, Region], int] = {}
    findings: list[Finding] = []
    for slot, pieces in sorted(slots.items()):
        expert = placed[slot]
        other = first.setdefault(expert, slot)
        if sorted(pieces, key=_order) != sorted(slots[other], key=_order) and not (cut and _same(pieces, slots[other])):
            said, has = (sorted({p[0] for p in of}) for of in (slots[other], pieces))
            a = next((s for s in said if s not in has), said[0] if said else "nothing")
            b = next((s for s in has if s not in said), has[0] if has else "nothing")
            sentence = (
                f"{parameter!r}: slots {other} and {slot} both hold expert {expert}, and are not loaded alike: slot "
                f"{other} from {a!r}, slot {slot} from {b!r}"
            )
            findings.append(Finding("RDT338", sentence, (parameter, a, b)))
            continue
        for source, dtype, region, _ in pieces:
            holder = taken.setdefault((source, dtype, region), expert)
            if holder != expert:
                sentence = (
                    f"{parameter!r}: slot {first[holder]} holds expert {holder}, slot {slot} expert {expert}, and both "
                    f"take the same of {source!r}"
                )
                findings.append(Finding("RDT338", sentence, (parameter, source)))
    return findings


def _order(piece: _Piece) -> tuple[object, ...]:
    source, dtype, taken, place = piece
    return place.offset, source, dtype, taken.offset, place.shape, place.stride, taken.shape, taken.stride


def _same(ours: list[_Piece], theirs: list[_Piece]) -> bool:
    """The same elements, in slices that were cut in other places; true also where they are too many to be looked at."""
    sides = []
    for pieces in (ours, theirs):
        by_source: dict[tuple[str, str], list[tuple[Region, Region]]] = {}
        for source, dtype, taken, place in pieces:
            by_source.setdefault((source, dtype), []).append((taken, place))
        sides.append({key: runs_of(pairs) for key, pairs in by_source.items()})
    if sides[0].keys() != sides[1].keys():
        return False
    return all(None in (runs, sides[1][key]) or runs == sides[1][key] for key, runs in sides[0].items())
