"""Experts placed by EPLB, against stock vLLM: `python tests/placements.py CASE...` prints outcomes, one a placement.

EPLB is for GPUs alone, so this becomes a process of one, as tests/quantized.py does. The oracle is stock `load_weights`
with vLLM's first map replaced by the wanted one; where layers are placed differently, each layer is taken from the
model that was loaded with its row. Some loaders of vLLM leave slots empty: there the oracle are the bytes that stock
`load_weights` puts into a slot of the expert that it does load.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from attrs import evolve

from rdtplan.compiler import Fleet, compile_plan, place_experts, recompile
from rdtplan.ir.manifest import Ints, SourceTensor
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import InferenceTopology, TransferSettings, positions
from rdtplan.ir.view import PlanInMemory, placement_of
from rdtplan.trace import platform
from rdtplan.verify import check_loaders
from tests import oracle
from tests import quantized as cases

TARGET = "sm90"
CUT = TransferSettings(max_chunk_bytes=100_000)
"""Slices of experts are larger than that."""
CASES = ("bf16-moe", "bf16-moe+cut", "bf16-moe+dp", "fp8-blocks-moe", "fp8-tensors-moe", "compressed-fp8-moe")
INCOMPLETE = ("fp8-blocks-mla", "mtp", "bf16-moe+fused", "Llama4ForCausalLM+none")
"""Cases in which vLLM's loader does not heed its map or does not load every slot: DeepSeek's one slot an expert and
worker, that of its draft model and of checkpoints with one tensor for all experts of a layer one slot an expert."""
TP2 = InferenceTopology(tensor_parallel=2, expert_parallel=True, redundant_experts=4)
TOPOLOGIES = {"dp": evolve(TP2, data_parallel=2), "none": evolve(TP2, redundant_experts=0)}


def fused(entries: list[SourceTensor]) -> list[SourceTensor]:
    """The same weights, all experts of a layer in one tensor."""
    found: dict[str, SourceTensor] = {}
    for entry in entries:
        layer, _, rest = entry.name.partition(".experts.")
        number, _, kind = rest.partition(".")
        if not number.isdecimal():
            found[entry.name] = entry
            continue
        rows, columns = entry.shape
        gate_up = kind.startswith(("gate", "up"))
        name = f"{layer}.experts.{'gate_up_proj' if gate_up else 'down_proj'}"
        count = int(number) + 1
        found[name] = evolve(entry, name=name, shape=(count, rows * 2 if gate_up else rows, columns))
    return list(found.values())


def shuffled(plan: FleetPlan, dice: random.Random, *, one_row: bool) -> dict[str, Ints]:
    """A placement for the layers of a plan: every expert once, the other slots to anybody."""
    found: dict[str, Ints] = {}
    for consumer in plan.consumers:
        experts = consumer.program.experts
        for module, logical, row in zip(experts.modules, experts.logical, experts.rows().values(), strict=True):
            slots = [*range(logical), *(dice.randrange(logical) for _ in range(len(row) - logical))]
            dice.shuffle(slots)
            found.setdefault(module, next(iter(found.values())) if one_row and found else tuple(slots))
    return found


def stock(rank: oracle.Rank, sources: oracle.Sources, placement: Mapping[str, Ints]) -> dict[str, torch.Tensor]:
    """What vLLM leaves in every tensor when its map is the wanted one, layer by layer."""
    from vllm.distributed.eplb.eplb_state import EplbState

    wanted: dict[str, torch.Tensor] = {}
    for row in dict.fromkeys(placement.values()):
        with mock.patch.object(EplbState, "build_initial_global_physical_to_logical_map", lambda *_, r=row: list(r)):
            loaded = cases._loaded(rank, lambda model: oracle.load_stock(model, sources))
        if not wanted:
            wanted = dict(loaded)
        for name in loaded:
            if placement.get(name.rpartition(".")[0]) == row:
                wanted[name] = loaded[name]
    return wanted


def by_expert(
    ranks: list[oracle.Rank], first: FleetPlan, sources: oracle.Sources, placement: Mapping[str, Ints]
) -> list[dict[str, torch.Tensor]]:
    """The same from one load with vLLM's own map: a slot has the bytes of the slot in which its expert was loaded."""
    loaded = [cases._loaded(rank, lambda model: oracle.load_stock(model, sources)) for rank in ranks]
    tables = [c.program.experts for c in first.consumers]
    bytes_of: dict[tuple[str, int], torch.Tensor] = {}
    for found, consumer, e in zip(loaded, first.consumers, tables, strict=True):
        p = consumer.program.parameters
        for row, layer, at in zip(e.parameters, e.layers, e.first, strict=True):
            slots = found[p.names[row]].reshape(p.shapes[row][0], -1)
            for slot, data in enumerate(slots, start=at):
                bytes_of.setdefault((p.names[row], e.initial[slot + (e.slot_end[layer - 1] if layer else 0)]), data)
    for found, consumer, e in zip(loaded, first.consumers, tables, strict=True):
        p = consumer.program.parameters
        for row, layer, at in zip(e.parameters, e.layers, e.first, strict=True):
            here = placement[e.modules[layer]][at : at + p.shapes[row][0]]
            found[p.names[row]] = torch.cat([bytes_of[p.names[row], expert] for expert in here])
    return loaded


def writes(plan: FleetPlan) -> list[set[tuple[Any, ...]]]:
    """All copies of every worker, spelled out."""
    found = []
    for c in plan.consumers:
        p, k, s = c.program, c.program.keys, c.program.scatters
        found.append(
            {
                (plan.manifest.names[k.source[key]], p.regions[k.region[key]], p.parameters.names[row], p.regions[dest])
                for key, row, dest in zip(s.key, s.parameter, s.region, strict=True)
            }
        )
    return found


def outcome(
    config_dir: Path,
    entries: list[SourceTensor],
    fleet: Fleet,
    arguments: dict[str, Any],
    rounds: int,
    has_map: bool,
) -> Iterator[dict[str, Any]]:
    """Every placement of a case: the bytes of all ranks, and the plan against one that was traced with that map."""
    from vllm.distributed.eplb.eplb_state import EplbState

    sources = oracle.finite_sources(entries)
    speculative = {k: v for k, v in arguments.items() if k == "speculative"}
    first = compile_plan(config_dir, entries, fleet, jobs=1, **arguments)
    dice = random.Random(len(entries))
    for number in range(rounds):
        first_one = placement_of(PlanInMemory(first))
        placement = shuffled(first, dice, one_row=number % 2 == 0) if number else first_one
        plan = place_experts(first, placement)
        again = compile_plan(config_dir, entries, evolve(fleet, placement=placement), jobs=1, **arguments)
        rows = set(placement.values())
        traced = True
        if len(rows) == 1 and has_map:
            (row,) = rows
            with mock.patch.object(EplbState, "build_initial_global_physical_to_logical_map", lambda *_: list(row)):  # noqa: B023
                traced = writes(compile_plan(config_dir, entries, fleet, jobs=1, **arguments)) == writes(plan)
        different: dict[str, int] = {}
        ranks = [oracle.Rank(config_dir, fleet.topology, p, arguments) for p in positions(fleet.topology)]
        if has_map:
            expected = [stock(rank, sources, placement) for rank in ranks]
        else:
            expected = by_expert(ranks, first, sources, placement)
        for rank, wanted, consumer in zip(ranks, expected, plan.consumers, strict=True):
            planned = cases._loaded(rank, cases._by_plan(consumer.program, plan.manifest, sources))
            for name in consumer.program.untouched:
                wanted.pop(name, None), planned.pop(name, None)
            different |= {f"{rank.position}: {n}": k for n, k in oracle.compare(wanted, planned).items()}
        yield {
            "different": different,
            "traced": traced,
            "same as compiled": plan.identity == again.identity,
            "loaders": [str(f) for f in check_loaders(plan, recompile(plan, config_dir, **speculative, jobs=1))],
            "same as before": plan.identity == first.identity,
            "rows": len(rows),
            "compared": len(planned),
            "notes": list(plan.notes),
        }


def run(names: list[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    platform.install(TARGET)
    torch.set_num_threads(1)
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            case, _, more = name.partition("+")
            arguments: dict[str, Any] = {}
            if case in cases.CASES:
                config_dir, entries, arguments = cases.model_dir(cases.CASES[case], Path(directory) / "model")
            else:
                config_dir = oracle.corpus_config(case, Path(directory))
                entries = oracle.corpus_manifest(case)
            settings = CUT if more == "cut" else TransferSettings()
            entries = fused(entries) if more == "fused" else entries
            fleet = Fleet(topology=TOPOLOGIES.get(more, TP2), trainer_ranks=2, target=TARGET, settings=settings)
            yield name, list(outcome(config_dir, entries, fleet, arguments, 2 if more else 4, name not in INCOMPLETE))


if __name__ == "__main__":
    for case_name, found in run(sys.argv[1:] or [*CASES, *INCOMPLETE]):
        print(json.dumps([case_name, found]), flush=True)
