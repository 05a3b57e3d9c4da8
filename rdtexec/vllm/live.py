"""What a vLLM worker is, as far as a plan has to know: the platform that it runs on."""

from __future__ import annotations

from vllm.platforms import current_platform

from rdtplan.ir.targets import CPU, target_name


def live_target() -> str:
    """The target that this process is one of: `cpu`, `sm90` for a GPU of capability 9.0."""
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return target_name(current_platform.device_type or CPU, None if capability is None else tuple(capability))
