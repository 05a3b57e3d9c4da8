"""What a model under EPLB says of its experts: which parameters have slots, and whom vLLM's loaders put there.

Nothing is read out of names. A layer of experts is vLLM's own module for them; a parameter has slots when it is that
module's own expert loader that loads it, and its first dimension counts the slots of this worker, or those of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch

from rdtplan.errors import TraceError
from rdtplan.ir.experts import NO_EXPERTS, Experts
from rdtplan.ir.manifest import Ints
from rdtplan.trace.watch import Watched, layers_of_experts


def find_experts(model: torch.nn.Module, watched: Watched, index: Mapping[int, int]) -> Experts:
    """The layers of experts under EPLB, `NO_EXPERTS` where there are none; `index` maps watched rows to parameters.

    TraceError RDT219 for a layer whose slots cannot be told.
    """
    layers = list(layers_of_experts(model))
    if not layers:
        return NO_EXPERTS
    from vllm.distributed.eplb.eplb_state import EplbState

    modules: list[str] = []
    logical: list[int] = []
    initial: list[Ints] = []
    rows: list[tuple[int, int, int]] = []
    for path, layer in layers:
        module = layer.routed_experts
        config = module.moe_config
        redundant = config.num_experts - config.num_logical_experts
        placed = EplbState.build_initial_global_physical_to_logical_map(config.num_logical_experts, redundant)
        rows += [(index[row], len(modules), first) for row, first in _slots(path, module, watched) if row in index]
        modules.append(path)
        logical.append(config.num_logical_experts)
        initial.append(tuple(placed))
    flat = tuple(expert for placed in initial for expert in placed)
    columns = zip(*sorted(rows), strict=True) if rows else ((), (), ())
    return Experts(tuple(modules), tuple(logical), tuple(accumulate(map(len, initial))), flat, flat, *columns)


def _slots(path: str, module: Any, watched: Watched) -> list[tuple[int, int]]:
    """(watched row, first slot) of every parameter of a layer that has slots."""
    held = module.expert_map_manager.get_local_expert_ids()
    shared = module.expert_map_manager.num_fused_shared_experts
    if shared or held != list(range(held[0], held[0] + len(held))):
        what = (
            f"it holds shared experts among its own ({shared})" if shared else f"its slots are {held}, no run of them"
        )
        raise _not_understood(path, what)
    found: list[tuple[int, int]] = []
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        row = watched.find(parameter)
        own = getattr(getattr(parameter, "weight_loader", None), "__self__", None) is module
        counts = parameter.ndim > 0 and parameter.shape[0] in (len(held), module.global_num_experts)
        if row is None or not own:
            if row is not None and counts and not watched.aliases[row]:
                raise _not_understood(path, f"{name!r} of shape {tuple(parameter.shape)} is not loaded by its loader")
            continue
        if not counts:
            raise _not_understood(path, f"{name!r} of shape {tuple(parameter.shape)} has no dimension for its slots")
        extent = 1 + sum((n - 1) * s for n, s in zip(parameter.shape[1:], parameter.stride()[1:], strict=True))
        if extent > parameter.stride(0):
            raise _not_understood(path, f"the slots of {name!r} lie in one another, stride {parameter.stride()}")
        found.append((row, held[0] if parameter.shape[0] == len(held) else 0))
    return found


def _not_understood(path: str, what: str) -> TraceError:
    return TraceError(
        f"the slots of the experts of {path!r} cannot be told: {what}",
        fix="run this model without EPLB, or load it by a full broadcast",
        code="RDT219",
    )
