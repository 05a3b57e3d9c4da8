"""A manifest generated from a config alone: the names a Hugging Face checkpoint of this model has, on meta tensors.

transformers builds the model without memory and, where it keeps fused weights in RAM that checkpoints store apart
(expert stacks), its own save conversion is run to get the checkpoint's names and shapes.
"""

from __future__ import annotations

import os
from typing import Any

from rdtplan.errors import InputError
from rdtplan.inputs.manifests import _natural_order
from rdtplan.inputs.quantized import quantized
from rdtplan.ir.manifest import SourceTensor


def manifest_from_config(config_dir: str | os.PathLike[str]) -> list[SourceTensor]:
    """Entries for the model of `config_dir`, quantized as its config says.

    InputError RDT109 when transformers does not know the model, RDT118 when its quantization's names are not known.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise InputError(
            f"a manifest from a config needs transformers: {error}",
            fix="pip install 'rdtplan[vllm]', or give a checkpoint directory",
            code="RDT109",
        ) from None
    try:
        config = AutoConfig.from_pretrained(str(config_dir))
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        method = vars(config).pop("quantization_config", None)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        state = _checkpoint_names(model)
    except Exception as error:
        raise InputError(
            f"transformers cannot build the model of {config_dir}: {str(error).splitlines()[0][:200]}",
            fix="give a checkpoint directory or a JSON manifest instead",
            code="RDT109",
        ) from error
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    entries = [
        SourceTensor(name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in state.items()
        if name not in tied
    ]
    if method is not None:
        entries = quantized(entries, method if isinstance(method, dict) else method.to_dict())
    return _natural_order(entries)


def _checkpoint_names(model: Any) -> dict[str, Any]:
    state = dict(model.state_dict())
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 keeps weights as checkpoints have them
        return state
    return dict(revert_weight_conversion(model, state))
