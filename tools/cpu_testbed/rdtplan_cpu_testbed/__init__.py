"""The CPU test bed: what stock CPU vLLM lacks to serve mixture-of-experts models with expert and data parallelism.

Nothing here happens unless `RDTPLAN_CPU_TESTBED=1`, and nothing of the product imports this package. The faults that
it works around are vLLM's (0.32, CPU), have nothing to do with weight transfer, and do not exist on GPUs. vLLM's faulty
reload of experts is *not* among them: the runtime meets that one itself (`repair_reload`).
"""

from __future__ import annotations

import os

SWITCH = "RDTPLAN_CPU_TESTBED"


def switched_on() -> bool:
    """Is the test bed asked for, by name?"""
    return os.environ.get(SWITCH) == "1"


def register() -> None:
    """`vllm.general_plugins`: apply the patches in this vLLM process; harmless when called again."""
    if not switched_on():
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from rdtplan_cpu_testbed.patches import apply_patches

        apply_patches()


def platform() -> str | None:
    """`vllm.platform_plugins`: a CPU platform that the Ray executor accepts; None leaves vLLM's own choice."""
    if not switched_on():
        return None
    from vllm.platforms import cpu_platform_plugin

    return "rdtplan_cpu_testbed.platform.RayCpuPlatform" if cpu_platform_plugin() else None
