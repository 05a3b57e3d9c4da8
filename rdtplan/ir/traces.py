"""What a dry run leaves behind: a worker's parameters and every write its loaders made, as plain columns."""

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from rdtplan.ir.experts import NO_EXPERTS, Experts
from rdtplan.ir.manifest import Ints
from rdtplan.ir.operations import NO_LEAVES, NO_OPERATIONS, Expression, Leaves, Operations
from rdtplan.ir.regions import Region
from rdtplan.ir.topology import Position


@frozen(slots=True)
class Parameters:
    """Parameters and buffers of one worker in checkpoint format (before post-processing), a row a storage.

    Operands follow: temporary contiguous tensors that fetches land in and operations read. A live model has none.
    """

    names: tuple[str, ...]
    """Full dotted name, the first under which the storage is found."""
    modules: Ints
    """Index into `module_names`: the leaf module that holds it."""
    dtypes: tuple[str, ...]
    shapes: tuple[Ints, ...]
    strides: tuple[Ints, ...]
    kinds: tuple[str, ...]
    """`parameter`, `buffer` or `operand`."""
    aliases: tuple[tuple[str, ...], ...]
    """Other names of the same storage (tied weights)."""
    module_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def held(self) -> int:
        """Rows that a live model holds: all but the operands."""
        return sum(kind != "operand" for kind in self.kinds)


@frozen(slots=True)
class Fetches:
    """Writes whose data come from a source tensor. Row k is the k-th such write in load order."""

    sources: Ints
    """Manifest index."""
    dtypes: Ints
    """Index into `RankTrace.dtype_table`: element type of the source region."""
    source_regions: Ints
    """Index into `RankTrace.regions`."""
    parameters: Ints
    dest_regions: Ints
    loaders: Ints
    """Index into `RankTrace.loaders`."""
    chains: Ints
    """Index into `RankTrace.chains`."""

    def __len__(self) -> int:
        return len(self.sources)


@frozen(slots=True)
class Fills:
    """Writes of one constant: padding rows that a loader sets to zero, say."""

    parameters: Ints
    regions: Ints
    values: tuple[float, ...]
    before: Ints
    """1 when no fetch into the parameter was recorded before: running the fill first keeps the order."""

    def __len__(self) -> int:
        return len(self.parameters)


@frozen(slots=True)
class RankTrace:
    """The dry run of one worker rank."""

    position: Position
    parameters: Parameters
    regions: tuple[Region, ...]
    """Canonical regions, numbered by first use."""
    dtype_table: tuple[str, ...]
    loaders: tuple[str, ...]
    """`function (file:line)` of the code that wrote."""
    chains: tuple[tuple[str, ...], ...]
    """Op chains in words, outermost operation last; provenance only."""
    fetches: Fetches
    fills: Fills
    fill_loaders: Ints
    """A fill: index into `loaders`."""
    untouched: tuple[str, ...]
    """Buffers that no loader writes."""
    untouched_reasons: tuple[str, ...] = ()
    """Why each of them may stay as it is."""
    kept: tuple[str, ...] = ()
    """Parameters that no loader writes and that need not be written."""
    kept_reasons: tuple[str, ...] = ()
    shared: Ints = ()
    """Manifest indices of sources that only a draft model loads, into memory that it then takes from the model."""
    overwritten: tuple[tuple[int, int], ...] = ()
    """(source, the one after it): scalars that vLLM loads into one place one after another, so that the last stays."""
    operations: Operations = NO_OPERATIONS
    leaves: Leaves = NO_LEAVES
    expressions: tuple[Expression, ...] = ()
    operation_loaders: Ints = ()
    """An operation: index into `loaders`."""
    experts: Experts = NO_EXPERTS


def written(trace: RankTrace) -> tuple[Any, ...]:
    """All that a plan executes of a trace. Workers whose traces are equal in it run the same program."""
    return (
        *(trace.parameters, trace.regions, trace.dtype_table, trace.fetches, trace.fills),
        *(trace.operations, trace.leaves, trace.expressions, trace.experts),
    )


def distinct_traces(traces: Sequence[RankTrace]) -> tuple[tuple[RankTrace, ...], Ints]:
    """(the first of every kind, number of a trace -> index of its kind)."""
    ids: dict[tuple[Any, ...], int] = {}
    found: list[RankTrace] = []
    kinds: list[int] = []
    for trace in traces:
        key = written(trace)
        if key not in ids:
            ids[key] = len(found)
            found.append(trace)
        kinds.append(ids[key])
    return tuple(found), tuple(kinds)
