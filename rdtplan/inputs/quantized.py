"""Checkpoint names of a quantized model: what each method stores in place of a linear layer's weight.

A trainer that publishes quantized weights, or a checkpoint that was quantized offline, has these names. Which layers
are quantized follows the `quantization_config` of config.json: linear weights, but for what it names as left out, the
head, embeddings and routers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from rdtplan.errors import InputError
from rdtplan.ir.manifest import SourceTensor

Rows = Iterator[tuple[str, str, tuple[int, ...]]]
"""(suffix in place of `weight`, dtype, shape)."""
Write = Callable[[int, int, Mapping[str, Any], str], Rows]
"""(outputs, inputs, quantization config, the model's dtype) -> what is stored for such a weight."""

_NEVER = ("*embed*", "*lm_head*", "*norm*", "*.gate.weight", "*router*", "*shared_expert_gate*", "*shared_head*")
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore")


def quantized(entries: Sequence[SourceTensor], config: Mapping[str, Any]) -> list[SourceTensor]:
    """The entries of an unquantized model as the method of `config` (a `quantization_config`) stores them.

    InputError RDT118 for a method whose names are not known here.
    """
    if config.get("quant_method") == "mxfp4":
        return [part for entry in entries for part in _mxfp4(entry)]
    method = _method(config)
    found: list[SourceTensor] = []
    for entry in entries:
        if not is_quantized(entry, config):
            found.append(entry)
            continue
        stem = entry.name.removesuffix("weight")
        outputs, inputs = entry.shape
        for suffix, dtype, shape in method(outputs, inputs, config, entry.dtype):
            found.append(SourceTensor(stem + suffix, dtype, shape, entry.owners))
    return found


def is_quantized(entry: SourceTensor, config: Mapping[str, Any]) -> bool:
    """Is this the weight of a layer that the method converts?"""
    if len(entry.shape) != 2 or not entry.name.endswith(".weight"):
        return False
    if any(fnmatchcase(entry.name, pattern) for pattern in _NEVER):
        return False
    module = entry.name.removesuffix(".weight")
    listed = [name for key in _LEFT_OUT for name in config.get(key) or ()]
    listed += [f"re:{rule[2:]}" for rule in config.get("dynamic") or () if rule.startswith("-:")]
    return not any(_names(module, name) for name in listed)


def _names(module: str, entry: str) -> bool:
    """Does an entry of a list of left-out modules name this one? Regular expressions begin with `re:`."""
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return module == entry or fnmatchcase(module, entry) or f".{entry}." in f".{module}."


def _method(config: Mapping[str, Any]) -> Write:
    name = config.get("quant_method")
    if name == "fp8":
        return _fp8_blocks if config.get("weight_block_size") else _fp8_tensors
    if name == "compressed-tensors":
        weights = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
        kinds = {(w.get("type"), w.get("num_bits"), w.get("strategy")) for w in weights}
        if kinds == {("float", 8, "channel")}:
            return _compressed_fp8
        if kinds == {("int", 4, "group")} and config.get("format") == "pack-quantized":
            return _compressed_int4
    known: dict[Any, Write] = {"awq": _awq, "gptq": _gptq}
    if name not in known:
        raise InputError(
            f"the checkpoint names of quantization {name!r} in this form are not known",
            fix="give a checkpoint directory or a JSON manifest; compiling needs no more",
            code="RDT118",
        )
    return known[name]


def _mxfp4(entry: SourceTensor) -> list[SourceTensor]:
    """gpt-oss: stacks of experts, transposed, as blocks of 32 numbers in 16 bytes and a scale each."""
    if len(entry.shape) != 3 or entry.name.rpartition(".")[2] not in ("gate_up_proj", "down_proj"):
        return [entry]
    experts, inputs, outputs = entry.shape
    blocks = (experts, outputs, inputs // 32)
    return [
        SourceTensor(f"{entry.name}_blocks", "uint8", (*blocks, 16), entry.owners),
        SourceTensor(f"{entry.name}_scales", "uint8", blocks, entry.owners),
    ]


def _fp8_blocks(outputs: int, inputs: int, config: Mapping[str, Any], dtype: str) -> Rows:
    rows, columns = config["weight_block_size"]
    yield "weight", "float8_e4m3fn", (outputs, inputs)
    yield "weight_scale_inv", "float32", (-(-outputs // rows), -(-inputs // columns))


def _fp8_tensors(outputs: int, inputs: int, config: Mapping[str, Any], dtype: str) -> Rows:
    yield "weight", "float8_e4m3fn", (outputs, inputs)
    yield "weight_scale", "float32", ()
    if config.get("activation_scheme") == "static":
        yield "input_scale", "float32", ()


def _compressed_fp8(outputs: int, inputs: int, config: Mapping[str, Any], dtype: str) -> Rows:
    yield "weight", "float8_e4m3fn", (outputs, inputs)
    yield "weight_scale", dtype, (outputs, 1)


def _compressed_int4(outputs: int, inputs: int, config: Mapping[str, Any], dtype: str) -> Rows:
    (group,) = {g["weights"]["group_size"] for g in config["config_groups"].values()}
    yield "weight_packed", "int32", (outputs, inputs // 8)
    yield "weight_scale", dtype, (outputs, inputs // group)
    yield "weight_shape", "int64", (2,)


def _awq(outputs: int, inputs: int, config: Mapping[str, Any], dtype: str) -> Rows:
    per_word, group = 32 // config["bits"], config["group_size"]
    yield "qweight", "int32", (inputs, outputs // per_word)
    yield "qzeros", "int32", (inputs // group, outputs // per_word)
    yield "scales", "float16", (inputs // group, outputs)


def _gptq(outputs: int, inputs: int, config: Mapping[str, Any], dtype: str) -> Rows:
    per_word, group = 32 // config["bits"], config["group_size"]
    groups = 1 if group == -1 else inputs // group
    yield "qweight", "int32", (inputs // per_word, outputs)
    yield "qzeros", "int32", (groups, outputs // per_word)
    yield "scales", "float16", (groups, outputs)
    yield "g_idx", "int32", (inputs,)
