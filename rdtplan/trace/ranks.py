"""Simulated ranks: any rank of any TP/PP/EP/DP layout in one process, with no process group.

vLLM's own `initialize_model_parallel` decides which ranks form which group; only the group objects are
replaced, by coordinators that know their ranks and refuse to communicate. So the layout rules are vLLM's,
of whichever version runs.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from rdtplan.errors import TraceError
from rdtplan.ir.topology import InferenceTopology, Position

_GROUPS = (
    *("_WORLD", "_INNER_DP_WORLD", "_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB"),
    "_NODE_COUNT",
)
_CACHES = (
    ("vllm.model_executor.models.utils", "_model_to_pp_missing_layer_names"),
    ("vllm.model_executor.layers.rotary_embedding", "_ROPE_DICT"),
)
"""vLLM's caches that take a process for one rank of one model. The first is keyed by `id(model)`, which the
next model may get again; the second hands out modules that other models already hold."""


class SilentGroup:
    """Stands for a ProcessGroup: knows its size and rank, and cannot send anything."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def global_rank(topology: InferenceTopology, position: Position) -> int:
    """Rank in the world of one replica (vLLM's order: DP, then PP, then TP)."""
    tp, pp = topology.tensor_parallel, topology.pipeline_parallel
    return (position.dp * pp + position.pp) * tp + position.tp


@contextlib.contextmanager
def fresh_caches() -> Iterator[None]:
    """Empty caches inside, the old content again outside."""
    with contextlib.ExitStack() as stack:
        for module, name in _CACHES:
            cache = getattr(importlib.import_module(module), name, None)
            if cache is not None:
                stack.enter_context(mock.patch.dict(cache, clear=True))
        yield


@contextlib.contextmanager
def simulated_rank(vllm_config: Any, topology: InferenceTopology, position: Position) -> Iterator[None]:
    """vLLM's parallel state as the worker at `position` sees it; restored on exit, whatever happens.

    TraceError when this process already has a live parallel state (a running worker must not be disguised).
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state as ps

    if ps.model_parallel_is_initialized():
        raise TraceError("this process is a live vLLM worker: a rank cannot be simulated in it", code="RDT210")
    rank, world = global_rank(topology, position), topology.workers_per_replica

    def coordinator(ranks: list[int], name: str) -> Any:
        group = object.__new__(ps.GroupCoordinator)
        silent = SilentGroup(len(ranks), ranks.index(rank))
        facts = {
            "unique_name": f"simulated:{name}",
            "rank": rank,
            "local_rank": 0,
            "device_index": 0,
            "ranks": ranks,
            "group_ranks": [ranks],
            "world_size": len(ranks),
            "rank_in_group": ranks.index(rank),
            "device": torch.device("cpu"),
            "device_communicator": None,
            "use_device_communicator": False,
            "mq_broadcaster": None,
            "use_custom_op_call": False,
            "use_cpu_custom_send_recv": False,
            "cpu_group": silent,
            "device_group": silent,
        }
        for key, value in facts.items():
            setattr(group, key, value)
        return group

    def make_group(group_ranks: list[list[int]], *_: Any, group_name: str | None = None, **__: Any) -> Any:
        mine = next(ranks for ranks in group_ranks if rank in ranks)
        return coordinator(mine, group_name or "anonymous")

    saved = {name: getattr(ps, name) for name in _GROUPS if hasattr(ps, name)}
    ps._WORLD = coordinator(list(range(world)), "world")
    if "_INNER_DP_WORLD" in saved:
        ps._INNER_DP_WORLD = ps._WORLD
    if "_NODE_COUNT" in saved:
        ps._NODE_COUNT = 1
    try:
        with (
            mock.patch.object(ps, "init_model_parallel_group", make_group),
            mock.patch.object(torch.distributed, "is_initialized", lambda: True),
            mock.patch.object(torch.distributed, "get_world_size", lambda *_: world),
            mock.patch.object(torch.distributed, "get_rank", lambda *_: rank),
            mock.patch.object(torch.distributed, "get_backend", lambda *_: "gloo"),
            set_current_vllm_config(vllm_config),
        ):
            ps.initialize_model_parallel(topology.tensor_parallel, topology.pipeline_parallel)
        with fresh_caches():
            yield
    finally:
        for name, value in saved.items():
            setattr(ps, name, value)
