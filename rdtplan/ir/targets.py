"""Targets: the platforms that a plan can be compiled for, as data.

A target is what vLLM asks a GPU about while it builds a model: its compute capability, and what the kernels of the CUDA
wheel can do there. The answers decide which kernel each layer takes, and so the shapes and types of its parameters. A
plan's header names its target, and a worker of another one refuses it.
"""

from __future__ import annotations

import re

from attrs import frozen

from rdtplan.errors import InputError

AUTO = "auto"
"""The platform of this machine, as vLLM sees it."""
CPU = "cpu"


@frozen(slots=True)
class Target:
    """One GPU platform. Device, memory and multiprocessors are those of a representative of it."""

    name: str
    capability: tuple[int, int]
    device: str
    memory_gib: int
    multiprocessors: int
    abilities: frozenset[str]
    """Capability queries of vLLM's compiled extensions that are true here; all others are false."""


_FP8 = ("cutlass_scaled_mm_supports_fp8",)
_FP8_BLOCKS = (*_FP8, "cutlass_scaled_mm_supports_block_fp8", "cutlass_group_gemm_supported")
_FP4 = (*_FP8_BLOCKS, "cutlass_scaled_mm_supports_fp4", "mxfp4_experts_quant_supported")

QUERIES = frozenset(_FP4)
"""Operators `(int capability) -> bool` of vLLM's CUDA extensions, which the CPU wheel does not have."""

TARGETS = {
    target.name: target
    for target in (
        Target("sm80", (8, 0), "NVIDIA A100-SXM4-80GB", 80, 108, frozenset()),
        Target("sm89", (8, 9), "NVIDIA L40S", 45, 142, frozenset(_FP8)),
        Target("sm90", (9, 0), "NVIDIA H200", 141, 132, frozenset(_FP8_BLOCKS)),
        Target("sm100", (10, 0), "NVIDIA B200", 180, 148, frozenset(_FP4)),
    )
}
"""GPU targets that can be compiled for from any machine. The capability queries answer what vLLM's operators answer
when built with CUDA 13."""


def target_name(device_type: str, capability: tuple[int, int] | None) -> str:
    """The target that a live platform is: `sm90` for a GPU of capability 9.0, else its device type (`cpu`)."""
    if device_type == "cuda" and capability is not None:
        return f"sm{capability[0]}{capability[1]}"
    return device_type


def may_be_target(name: str) -> bool:
    """Is this the name of a target, or could it be that of a live GPU?"""
    return name in (AUTO, CPU, *TARGETS) or re.fullmatch(r"sm[7-9]\d|sm1\d\d|rocm|xpu", name) is not None


def check_target(name: str) -> None:
    """InputError RDT116 for a target that this machine is not and that no table describes."""
    if name not in (CPU, *TARGETS):
        raise InputError(
            f"target {name!r} is not known",
            fix=f"give one of {', '.join((AUTO, CPU, *TARGETS))}; {AUTO} is the platform of this machine",
            code="RDT116",
        )
