"""Small models for speculative decoding: a model and its draft model, as configs, manifests and random checkpoints."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rdtplan.inputs.config_manifest import manifest_from_config
from rdtplan.inputs.manifests import from_json
from rdtplan.ir.manifest import SourceTensor

CORPUS = Path(__file__).parent / "corpus"
MLA, LLAMA = "DeepseekV3ForCausalLM@mla", "LlamaForCausalLM"


def target(method: str, sizes: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[SourceTensor]]:
    """Config and manifest of the model, of other `sizes` if given; with `mtp` a prediction layer is in both."""
    name = MLA if method == "mtp" else LLAMA
    config = json.loads((CORPUS / f"configs/{name}.json").read_text())
    entries = list(from_json(CORPUS / f"manifests/{name}.json"))
    if sizes:
        config |= sizes
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(config))
            entries = manifest_from_config(directory)
    if method == "mtp":
        config["num_nextn_predict_layers"] = 1
        entries += _prediction_layer(config, entries)
    return config, entries


def draft(method: str) -> tuple[dict[str, Any], list[SourceTensor]] | None:
    """Config and manifest of a draft model of its own, by the names of its checkpoint; None with `mtp`."""
    if method == "mtp":
        return None
    config, entries = target(method)
    config["num_hidden_layers"] = 1
    first = [e for e in entries if ".layers." not in e.name or ".layers.0." in e.name]
    if method == "draft_model":
        return config, first
    hidden = config["hidden_size"]
    config["architectures"] = ["LlamaForCausalLM"]
    inner = [e for e in first if ".layers.0." in e.name and not e.name.endswith("input_layernorm.weight")]
    entries = [SourceTensor(e.name.removeprefix("model."), e.dtype, e.shape) for e in inner]
    return config, [*entries, SourceTensor("fc.weight", "bfloat16", (hidden, 2 * hidden))]


def _prediction_layer(config: dict[str, Any], entries: list[SourceTensor]) -> list[SourceTensor]:
    layers, hidden, words = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    found = [SourceTensor(e.name.replace(last, new), e.dtype, e.shape) for e in entries if e.name.startswith(last)]
    own = {
        "embed_tokens": (words, hidden),
        "enorm": (hidden,),
        "hnorm": (hidden,),
        "eh_proj": (hidden, 2 * hidden),
        "shared_head.norm": (hidden,),
        "shared_head.head": (words, hidden),
    }
    return found + [SourceTensor(f"{new}{name}.weight", "bfloat16", shape) for name, shape in own.items()]


def write_target(method: str, directory: Path, seed: int) -> Path:
    """A random checkpoint of the model; a prediction layer's embedding and head are the model's own."""
    config, entries = target(method)
    return _write(config, entries, directory, seed)


def write_draft(method: str, directory: Path, seed: int) -> Path | None:
    """A random checkpoint of the draft model, None where it has none of its own."""
    found = draft(method)
    return None if found is None else _write(*found, directory, seed + 1000)


def _write(config: dict[str, Any], entries: list[SourceTensor], directory: Path, seed: int) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    rng = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for e in entries:
        values = torch.randn(e.shape, generator=rng) * (0.1 if len(e.shape) > 1 else 0.2)
        weights[e.name] = (values + (1 if "norm" in e.name else 0)).to(getattr(torch, e.dtype))
    for copy, of in (
        (".embed_tokens.weight", "model.embed_tokens.weight"),
        (".shared_head.head.weight", "lm_head.weight"),
    ):
        for name in [n for n in weights if n.endswith(copy) and n != of]:
            weights[name] = weights[of].clone()
    save_file(weights, str(directory / "model.safetensors"))
    return directory
