"""The patches, one function a fault."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_MARK = "_rdtplan_cpu_testbed"


def apply_patches() -> None:
    """All of them, once a process."""
    if not hasattr(CPUUnquantizedExperts, _MARK):
        _heed_expert_map()
        _add_uneven_collectives()
        setattr(CPUUnquantizedExperts, _MARK, True)


def _heed_expert_map() -> None:
    """Expert parallelism: the CPU kernel indexes a worker's own experts with global expert ids, and crashes.

    Ids are made local; a choice that another worker holds becomes local expert 0 with weight 0.
    """
    stock = CPUUnquantizedExperts.apply
    signature = inspect.signature(stock)

    def apply(self: CPUUnquantizedExperts, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        expert_map = call.arguments.get("expert_map")
        if expert_map is not None:
            ids = call.arguments["topk_ids"]
            local = expert_map[ids.long()]
            elsewhere = local < 0
            call.arguments["topk_ids"] = local.masked_fill(elsewhere, 0).to(ids.dtype)
            call.arguments["topk_weights"] = call.arguments["topk_weights"].masked_fill(elsewhere, 0)
        stock(*call.args, **call.kwargs)

    CPUUnquantizedExperts.apply = apply  # type: ignore[method-assign]


def _add_uneven_collectives() -> None:
    """Data with expert parallelism: the CPU communicator lacks the collectives over ranks with unequal token counts.

    Both are made of even ones: gather with padding, and sum everything, then cut.
    """

    def all_gatherv(
        self: CpuCommunicator, input_: Any, dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(input_, list | tuple):
            return [all_gatherv(self, part, dim, sizes) for part in input_]
        if dim != 0:
            raise NotImplementedError(f"all_gatherv along dim {dim}")
        sizes = sizes or [input_.shape[0]] * self.world_size
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(
        self: CpuCommunicator, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        if dim != 0 and input_.dim() != 1:
            raise NotImplementedError(f"reduce_scatterv along dim {dim}")
        total = input_.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.device_group)
        sizes = sizes or [total.shape[0] // self.world_size] * self.world_size
        return total.split(sizes)[self.rank_in_group].clone()

    CpuCommunicator.all_gatherv = all_gatherv  # type: ignore[method-assign]
    CpuCommunicator.reduce_scatterv = reduce_scatterv  # type: ignore[method-assign]
