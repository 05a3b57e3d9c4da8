"""Where the experts of a live model are, by vLLM's EPLB, held to what the plan says.

Every layer of experts routes by tensors that EPLB updates whenever it moves experts, so they are the truth: the slots
of a logical expert, and how many they are. They are read anew each time, all layers in one copy to the host.
"""

from __future__ import annotations

import torch

from rdtplan.errors import PlanMismatch
from rdtplan.ir.experts import Experts, differences
from rdtplan.trace.watch import layers_of_experts

_FIX = (
    "dump the live placement, json.dump(llm.apply_model(live_placement)[0], file) with rdtexec.vllm.experts."
    "live_placement, and place the plan's experts anew: rdtplan compile --from OLD.plan --expert-placement FILE"
)


def live_placement(model: torch.nn.Module) -> dict[str, list[int]]:
    """The logical expert in every slot of all workers, by layer (leaf module); empty without EPLB.

    Of a pipeline parallel engine every stage has its own layers: put them together. PlanMismatch RDT519 where vLLM has
    not set up EPLB for a layer, or its tables contradict one another.
    """
    layers = list(layers_of_experts(model))
    columns: list[torch.Tensor] = []
    for name, layer in layers:
        config, state = layer.routed_experts.moe_config, layer.eplb_state
        if state.logical_to_physical_map is None:
            raise PlanMismatch(
                f"layer {name!r} has EPLB, and vLLM has set up no placement of its experts",
                fix="initialize the transfer when the model has been loaded",
                code="RDT519",
            )
        most = 1 + config.num_experts - config.num_logical_experts
        columns += [state.logical_replica_count.reshape(-1), state.logical_to_physical_map[:, :most].reshape(-1)]
    if not columns:
        return {}
    values = iter(torch.cat([column.to(torch.int64) for column in columns]).tolist())
    found: dict[str, list[int]] = {}
    for name, layer in layers:
        config = layer.routed_experts.moe_config
        most = 1 + config.num_experts - config.num_logical_experts
        counts = [next(values) for _ in range(config.num_logical_experts)]
        row = [-1] * config.num_experts
        for expert, count in enumerate(counts):
            slots = [next(values) for _ in range(most)]
            for slot in slots[:count]:
                if 0 <= slot < len(row):
                    row[slot] = expert
        if -1 in row:
            raise PlanMismatch(
                f"layer {name!r}: what vLLM routes by has no expert in slot {row.index(-1)} of {len(row)}",
                fix="look at vLLM's log; a rebalancing may have failed",
                code="RDT519",
            )
        found[name] = row
    return found


def check_placement(experts: Experts, model: torch.nn.Module) -> None:
    """PlanMismatch RDT519 names the first layer and slot in which a worker has another expert than the plan."""
    planned, live = experts.rows(), live_placement(model)
    for name in (*planned, *live):
        if name not in planned or name not in live:
            has, lacks = ("plan", "worker") if name in planned else ("worker", "plan")
            raise PlanMismatch(
                f"layer {name!r}: the {has} has a placement of its experts (EPLB), the {lacks} has none",
                fix="compile the plan with --redundant-experts as the workers run",
                code="RDT519",
            )
        ours, theirs = planned[name], tuple(live[name])
        if len(ours) != len(theirs):
            raise PlanMismatch(
                f"layer {name!r} has {len(ours)} slots for experts in the plan, {len(theirs)} in this worker",
                fix="compile the plan with --redundant-experts as the workers run",
                code="RDT519",
            )
        other = differences(ours, theirs)
        if other:
            slot = other[0]
            raise PlanMismatch(
                f"layer {name!r}, slot {slot}: the plan writes expert {ours[slot]} there, this worker holds expert "
                f"{theirs[slot]}; {len(other) - 1} more slots of the layer differ",
                fix=_FIX,
                code="RDT519",
            )
