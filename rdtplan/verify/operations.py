"""Operations of a program whose indices are sound: what they read has landed, and fits what they compute.

Everything here is arithmetic on the closed table: expressions are bounded and acyclic, every node has the type and
shape that its entry gives, leaves and destinations have the size of what is read and written, and an operation stays
inside one leaf module, whose scatters are all done when it is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from rdtplan.ir.operations import MOST_GROWTH, Expression, flaw
from rdtplan.ir.plan import Program
from rdtplan.ir.regions import Region, contiguous_stride, span

Flaw = tuple[str, str, str]
"""(field, sentence, code)."""


def operation_flaws(program: Program) -> Iterator[Flaw]:
    """Everything that is wrong with operands, expressions and operations."""
    yield from _operand_flaws(program)
    wrong = [flaw(e) for e in program.expressions]
    for i, reason in enumerate(wrong):
        if reason:
            yield f"expressions[{i}]", reason, "RDT331"
    if any(wrong):
        return
    leaves_of = [_leaves(e) for e in program.expressions]
    extents = _extents(program)
    used: set[int] = set()
    p, operations, leaves = program.parameters, program.operations, program.leaves
    start = 0
    for k, end in enumerate(operations.leaf_end):
        field = f"operations[{k}]"
        row, region = operations.parameters[k], program.regions[operations.regions[k]]
        expression = program.expressions[operations.expressions[k]]
        if p.kinds[row] == "operand":
            yield f"operations.parameters[{k}]", f"{p.names[row]!r} is an operand: only fetches write it", "RDT331"
        if not _inside(region, extents[row]):
            yield f"operations.regions[{k}]", f"it leaves parameter {p.names[row]!r}", "RDT313"
        root = expression.nodes[-1]
        if prod(root.shape) != region.numel:
            what = f"it computes {prod(root.shape)} elements and writes {region.numel} of {p.names[row]!r}"
            yield f"operations.regions[{k}]", what, "RDT331"
        wanted = leaves_of[operations.expressions[k]]
        if end - start != len(wanted):
            yield f"operations.leaf_end[{k}]", f"it has {end - start} leaves, its expression {len(wanted)}", "RDT331"
            start = end
            continue
        numel = region.numel
        for at, (dtype, shape) in zip(range(start, end), wanted, strict=True):
            leaf, read = leaves.rows[at], program.regions[leaves.regions[at]]
            numel += read.numel
            used.add(leaf)
            if p.modules[leaf] != p.modules[row]:
                what = f"{p.names[row]!r} is computed from {p.names[leaf]!r}, which is of another module"
                yield f"leaves.rows[{at}]", what, "RDT331"
            if not _inside(read, extents[leaf]):
                yield f"leaves.regions[{at}]", f"it leaves {p.names[leaf]!r}", "RDT314"
            if (p.dtypes[leaf], read.numel) != (dtype, prod(shape)):
                what = (
                    f"it reads {read.numel} elements of {p.names[leaf]!r} ({p.dtypes[leaf]}), "
                    f"its expression takes {prod(shape)} of {dtype}"
                )
                yield f"leaves.regions[{at}]", what, "RDT331"
        start = end
        largest = max(prod(node.shape) for node in expression.nodes)
        if largest > MOST_GROWTH * max(numel, 1):
            yield field, f"it makes {largest:,} elements of {numel:,}", "RDT331"
    for row, kind in enumerate(p.kinds):
        if kind == "operand" and row not in used:
            yield f"parameters.kinds[{row}]", f"no operation reads operand {p.names[row]!r}", "RDT331"


def _operand_flaws(program: Program) -> Iterator[Flaw]:
    p = program.parameters
    operands = {row for row, kind in enumerate(p.kinds) if kind == "operand"}
    if not operands:
        return
    for row in range(p.held, len(p)):
        if row not in operands:
            yield f"parameters.kinds[{row}]", "operands stand last", "RDT331"
    for row in sorted(operands):
        if p.strides[row] != contiguous_stride(p.shapes[row]) or p.aliases[row]:
            yield f"parameters.strides[{row}]", f"operand {p.names[row]!r} is not contiguous or has aliases", "RDT331"
    for row in sorted(operands.intersection(program.fills.parameters)):
        yield "fills.parameters", f"{p.names[row]!r} is an operand: only fetches write it", "RDT331"
    dtypes = program.dtype_table
    for s, (key, row) in enumerate(zip(program.scatters.key, program.scatters.parameter, strict=True)):
        if row in operands and dtypes[program.keys.dtype[key]] != p.dtypes[row]:
            what = f"operand {p.names[row]!r} ({p.dtypes[row]}) is fetched as {dtypes[program.keys.dtype[key]]}"
            yield f"scatters.key[{s}]", what, "RDT331"


def _leaves(expression: Expression) -> list[tuple[str, tuple[int, ...]]]:
    found = {node.ints[0]: (node.dtype, node.shape) for node in expression.nodes if node.op == "leaf"}
    return [found[k] for k in sorted(found)]


def _extents(program: Program) -> list[int]:
    p = program.parameters
    return [span(Region(s, t, 0))[1] if all(s) else 0 for s, t in zip(p.shapes, p.strides, strict=True)]


def _inside(region: Region, extent: int) -> bool:
    return not region.numel or span(region)[1] <= extent
