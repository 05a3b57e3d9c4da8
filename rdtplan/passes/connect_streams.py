"""Stage streams: chunks that depend on each other's producers, and so on each other's free signals.

Producers are connected when they co-own names in one gather group (they gather and free it together); streams
are the connected components, numbered by the first group that needs them. With a pipeline-parallel trainer of
two stages, (0, 1) for the first half of the layers and (2, 3) for the second, there are two streams, and they
may be pulled concurrently. A leaf module whose scatters fall into two streams would be completed by a race,
and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
from attrs import evolve

from rdtplan.errors import PlanError
from rdtplan.ir.manifest import Ints
from rdtplan.ir.plan import GatherGroup
from rdtplan.ir.topology import Ownership
from rdtplan.passes.draft import Draft, ProgramDraft


def connect_streams(draft: Draft) -> Draft:
    """Number the streams and set every chunk's; PlanError RDT303 when a module straddles two."""
    assert draft.ownership is not None
    component_of = number_streams(draft.ownership, draft.groups)
    return evolve(
        draft,
        component_of=component_of,
        programs=tuple(_set_streams(draft, p, component_of) for p in draft.programs),
    )


def number_streams(ownership: Ownership, groups: Sequence[GatherGroup]) -> Ints:
    """The stream of every gather group."""
    graph: nx.Graph[int] = nx.Graph()
    owners_of_group: list[list[int]] = []
    for group in groups:
        classes = set(ownership.class_of[group.first : group.first + group.count])
        ranks = sorted({r for c in classes for r in ownership.classes[c]})
        owners_of_group.append(ranks)
        nx.add_path(graph, ranks)
    component = {rank: i for i, ranks in enumerate(nx.connected_components(graph)) for rank in ranks}
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(component[ranks[0]], len(numbers)) for ranks in owners_of_group)


def _set_streams(draft: Draft, program: ProgramDraft, component_of: tuple[int, ...]) -> ProgramDraft:
    assert program.chunks is not None and program.scatters is not None
    streams = tuple(component_of[g] for g in program.chunks.group)
    parameters = program.trace.parameters
    stream_of_module: dict[int, tuple[int, int]] = {}
    start = 0
    for chunk, end in enumerate(program.chunks.scatter_end):
        for parameter in program.scatters.parameter[start:end]:
            module = parameters.modules[parameter]
            seen, first_chunk = stream_of_module.setdefault(module, (streams[chunk], chunk))
            if seen != streams[chunk]:
                a, b = (draft.groups[program.chunks.group[c]].label for c in (first_chunk, chunk))
                raise PlanError(
                    f"module {parameters.module_names[module]!r} takes weights from two streams: "
                    f"group {a!r} (stream {seen}) and group {b!r} (stream {streams[chunk]})",
                    fix="let one trainer rank own names of both groups, or give both to the same ranks",
                    code="RDT303",
                )
        start = end
    return evolve(program, chunks=evolve(program.chunks, stream=streams))
