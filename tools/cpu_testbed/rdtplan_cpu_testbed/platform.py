"""A CPU platform for vLLM's Ray executor, which wants to know which Ray resource counts its devices.

Start Ray with pretend devices: `ray.init(num_gpus=N)`.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """`CpuPlatform`, one pretend GPU a worker."""

    ray_device_key = "GPU"
    ray_noset_device_env_vars = ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",)
