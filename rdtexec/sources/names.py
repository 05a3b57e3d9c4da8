"""From a module's parameter names to those of the checkpoint, which are the plan's source names."""

from __future__ import annotations

from collections.abc import Iterator

import torch

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Segments that torch.compile, activation checkpointing and FSDP put into names."""


def strip_wrappers(name: str) -> str:
    """`name` without the segments of torch's wrappers.

    >>> strip_wrappers("_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.gate.weight")
    'model.layers.0.mlp.gate.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def whole(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter is one weight of the checkpoint."""
    yield name, tensor


def split_experts(name: str, tensor: torch.Tensor, *, first: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the experts that transformers 5 keeps fused, under the names that checkpoints have.

    `experts.gate_up_proj` (experts, 2 * intermediate, hidden) and `experts.down_proj` (experts, hidden, intermediate)
    become `experts.E.gate_proj.weight`, `experts.E.up_proj.weight` and `experts.E.down_proj.weight`, as in Qwen3-MoE,
    DeepSeek-V3 and GLM-4.5; anything else stays whole. `first` is the number of the first expert of an expert-parallel
    rank.
    """
    module, _, leaf = name.rpartition(".")
    if not module.endswith("experts") or leaf not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
        yield name, tensor
        return
    for expert, weight in enumerate(tensor, first):
        if leaf == "down_proj":
            yield f"{module}.{expert}.down_proj.weight", weight
        else:
            gate, up = weight.chunk(2)
            yield f"{module}.{expert}.gate_proj.weight", gate
            yield f"{module}.{expert}.up_proj.weight", up
