"""The target platform of a process: what vLLM takes the machine for.

vLLM decides once in a process which platform it runs on, and imports accordingly. `install` decides it beforehand: a
CUDA platform with the capability of the target, and stand-ins for what this machine lacks of the CUDA wheel: extension
modules, the capability queries in them, and the packages that the wheel brings along. What is there is used. Nothing of
this runs a kernel; vLLM's layers only ask before they choose their parameters.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from rdtplan.errors import TraceError
from rdtplan.ir.targets import CPU, QUERIES, TARGETS, Target, target_name

_EXTENSIONS = (
    *("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"),
    *("vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C"),
)
"""Extension modules of the CUDA wheel, whose absence turns kernels off."""
_OF_THE_CPU_WHEEL = "vllm._C"
"""Its operators have names of the CUDA wheel's and other signatures."""
_LOOKED_UP = (
    *("silu_and_mul", "mul_and_silu", "fatrelu_and_mul", "situ_and_mul", "silu_and_mul_with_clamp"),
    *("gelu_and_mul", "gelu_tanh_and_mul", "gelu_tanh", "gelu_new", "gelu_fast", "gelu_quick", "relu_squared"),
)
"""Operators that activations look up when they are made, to be called in a forward pass."""
_PRESENT = {
    "vllm.utils.import_utils": ("has_deep_gemm", "has_triton_kernels"),
    "vllm.utils.flashinfer": (
        *("has_flashinfer", "has_flashinfer_moe", "has_flashinfer_trtllm_fused_moe"),
        "has_flashinfer_cutlass_fused_moe",
    ),
}
"""Questions of vLLM after packages that the CUDA wheel contains or requires. All are true where it is installed with a
CUDA toolkit or FlashInfer's compiled kernels, as in vLLM's images."""

_DEVICES, _CUDA_MAJOR = 64, 13
"""GPUs that vLLM sees, as many as a layout may want; CUDA of the wheel."""
_MOVES = {torch.Tensor.to, torch.Tensor.cuda, torch.nn.Module.to}

_installed: str | None = None
_kept: list[Any] = []
"""Registered operators live as long as this."""


def installed() -> str | None:
    """The target that this process was given, None when vLLM is left to find the platform by itself."""
    return _installed


def live_target() -> str:
    """The target of the platform that vLLM has, or would find, in this process."""
    if _installed is not None:
        return _installed
    if "vllm" not in sys.modules:  # a live worker's own logging is left alone
        from rdtplan.trace.model import import_vllm

        import_vllm()
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return target_name(current_platform.device_type or CPU, None if capability is None else tuple(capability))


def is_here(target: str) -> bool:
    """Can this process trace for `target`, without vLLM having to be imported to know it?"""
    if _installed is not None:
        return target == _installed
    if torch.cuda.is_available() and torch.version.cuda:
        return target == target_name("cuda", torch.cuda.get_device_capability())
    return target == CPU


def install(target: str) -> None:
    """Make this process one of `target`, for good. TraceError RDT216 when vLLM has chosen another platform already."""
    global _installed
    platforms = sys.modules.get("vllm.platforms")
    if _installed == target:
        return
    if _installed is not None or getattr(platforms, "_current_platform", None) is not None:
        raise TraceError(
            f"this process cannot become one of target {target!r}: vLLM already runs in it on "
            f"{_installed or 'the platform of this machine'}",
            fix="compile for another target in a process of its own",
            code="RDT216",
        )
    if target == CPU:
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    else:
        _install_cuda(TARGETS[target])
    _installed = target


def _install_cuda(target: Target) -> None:
    from rdtplan.trace.model import quiet

    quiet()
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"  # that a package is missing after all is logged as an error
    os.environ.pop("VLLM_TARGET_DEVICE", None)
    stub_extensions()
    _define_operators(target)
    import vllm.platforms

    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    vllm.platforms._current_platform = _platform_class(target)()
    for module, questions in _PRESENT.items():
        _answer_yes(module, questions)
    from vllm.triton_utils import HAS_TRITON, triton

    if not HAS_TRITON:  # vLLM's own stand-in for it has no configurations to choose from
        triton.Config = _TritonConfig


class _TritonConfig:
    """A kernel configuration that is looked at and never compiled."""

    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **others: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


def prefer_cpu() -> None:
    """Let vLLM take the CPU on a machine without a GPU, also where its CUDA wheel is installed, which then finds no
    platform by itself."""
    if "vllm.platforms" not in sys.modules and _files(_EXTENSIONS[0]) and not torch.accelerator.is_available():
        os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")


def stub_extensions() -> None:
    """An empty module in place of every extension that this machine does not have or cannot load."""
    missing = [name for name in _EXTENSIONS if not _loads(name)]
    if _EXTENSIONS[0] in missing:
        missing.append(_OF_THE_CPU_WHEEL)
    for name in missing:
        sys.modules[name] = types.ModuleType(name)


def _files(name: str) -> list[Path]:
    """The files of an extension of vLLM, whose package is not imported to find them."""
    home = importlib.util.find_spec("vllm")
    folders = (home.submodule_search_locations or ()) if home is not None else ()
    *packages, module = name.split(".")[1:]
    return [path for folder in folders for path in Path(folder, *packages).glob(f"{module}.*so")]


def _loads(name: str) -> bool:
    """Is the extension there, with all the libraries that it needs?"""
    try:
        for path in _files(name):
            ctypes.CDLL(str(path))
    except OSError:
        return False
    return bool(_files(name))


def _define_operators(target: Target) -> None:
    """Operators that no loaded extension has: capability queries with the target's answers, and names to be found."""
    library = torch.library.Library("_C", "FRAGMENT")
    _kept.append(library)
    for query in sorted(QUERIES):
        if not hasattr(torch.ops._C, query):
            answer = query in target.abilities
            library.define(f"{query}(int capability) -> bool")
            library.impl(query, lambda capability, answer=answer: answer, "CompositeExplicitAutograd")
    for name in _LOOKED_UP:
        if not hasattr(torch.ops._C, name):
            library.define(f"{name}(Tensor! out, Tensor input) -> ()")


def _platform_class(target: Target) -> type[Any]:
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    capability = DeviceCapability(*target.capability)

    class TargetPlatform(NonNvmlCudaPlatform):  # type: ignore[misc]
        """CUDA as the target has it, with none of its devices here."""

        @classmethod
        def import_kernels(cls) -> None:
            """Those that load are loaded."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return capability

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return target.device

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return target.memory_gib << 30

        @classmethod
        def device_count(cls) -> int:
            return _DEVICES

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return target.multiprocessors

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

        @classmethod
        def is_arch_support_pdl(cls) -> bool:
            return target.capability >= (9, 0)

        @classmethod
        def get_cuda_runtime_major(cls) -> int:
            return _CUDA_MAJOR

        @classmethod
        def set_device(cls, device: torch.device) -> None:
            """There is none to set."""

    return TargetPlatform


def _answer_yes(module_name: str, questions: tuple[str, ...]) -> None:
    """Let vLLM find a package there, also where the question was imported from its module already."""
    module = importlib.import_module(module_name)
    for question in questions:
        asked = getattr(module, question, None)
        for other in [m for n, m in sys.modules.items() if n.startswith("vllm.")]:
            if asked is not None and vars(other).get(question) is asked:
                setattr(other, question, _yes)


def _yes() -> bool:
    return True


def engine_settings() -> dict[str, Any]:
    """Engine arguments of this process' target: no fusion passes, which look for operators that only GPUs have."""
    if _installed in (None, CPU):
        return {}
    return {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}


class _OnHost(TorchFunctionMode):
    """Memory that a model asks to have on a GPU is made on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and func not in _MOVES:
            return func(*args)
        kwargs = kwargs or {}
        if (device := kwargs.get("device")) is not None and _is_gpu(device):
            kwargs = {**kwargs, "device": "cpu"}
        if func in _MOVES:
            args = tuple("cpu" if _is_gpu(a) else a for a in args)
            if func is torch.Tensor.cuda:
                return args[0]
        return func(*args, **kwargs)


def _is_gpu(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"


def is_stood_in(device: Any) -> bool:
    """Is this a GPU of the target, where this machine is none?"""
    return _installed not in (None, CPU) and _is_gpu(device)


class _NoStream:
    """Stands for a CUDA stream or event: models make them, and no forward pass comes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


@contextlib.contextmanager
def without_devices() -> Iterator[None]:
    """Where this process is of a GPU target that it has no GPU of: what builds and loads a model stays on the host."""
    if _installed in (None, CPU):
        yield
        return
    with (
        mock.patch.object(torch.cuda, "Stream", _NoStream),
        mock.patch.object(torch.cuda, "Event", _NoStream),
        _OnHost(),
    ):
        yield
