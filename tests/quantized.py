"""Quantized models for every target, against stock vLLM: `python tests/quantized.py TARGET [CASE...]` prints outcomes.

Run as a script it becomes a process of that target, as the compiler's own does, and both loads happen in it on tensors
of the host: vLLM's `load_weights` into the parameters that the target's kernels want, and the executed plan. What
post-processing makes of them is no plan's business.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen

from rdtplan.compiler import Fleet, compile_plan
from rdtplan.errors import RdtError
from rdtplan.inputs.config_manifest import manifest_from_config
from rdtplan.inputs.quantized import quantized
from rdtplan.ir.manifest import SourceTensor
from rdtplan.ir.plan import Program
from rdtplan.ir.topology import InferenceTopology, positions
from rdtplan.trace import platform
from tests import drafts, oracle

TP2 = InferenceTopology(tensor_parallel=2)
TP2_EP = InferenceTopology(tensor_parallel=2, expert_parallel=True)

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_attention_heads": 4}
DENSE = ("Qwen3ForCausalLM", SIZES)
MOE = ("Qwen3MoeForCausalLM", {**SIZES, "moe_intermediate_size": 256})
NARROW = ("Qwen3MoeForCausalLM", {**SIZES, "moe_intermediate_size": 192, "norm_topk_prob": True})
MLA = (
    "DeepseekV3ForCausalLM@mla",
    {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "q_lora_rank": 128},
)
GPT_OSS = ("GptOssForCausalLM@mxfp4", {"hidden_size": 320, "intermediate_size": 320})
"""Sizes that kernels round up differently."""

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ONE = {"num_speculative_tokens": 1}
GATES = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
TENSORS = {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": GATES}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 64,
    "desc_act": False,
    "sym": True,
    "lm_head": False,
    "dynamic": {r"-:.*mlp\.gate$": {}},
}


def _compressed(format: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


CHANNELS = _compressed(
    "float-quantized",
    {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
    {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
)
INT4 = _compressed(
    "pack-quantized",
    {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64},
    None,
)


@frozen
class Case:
    """One model with one kind of quantization."""

    label: str
    """For the table."""
    base: tuple[str, dict[str, Any]]
    """A corpus model, and what is changed in its config."""
    config: dict[str, Any] | None
    """`quantization_config`."""
    topology: InferenceTopology = TP2
    arguments: dict[str, Any] = field(factory=dict)
    """More engine arguments."""


CASES = {
    "bf16": Case("none (BF16)", DENSE, None),
    "bf16-moe": Case("none (BF16), experts", MOE, None, TP2_EP),
    "bf16-narrow-moe": Case("none (BF16), experts of 96 a rank", NARROW, None),
    "fp8-blocks": Case("FP8, 128x128 blocks", DENSE, BLOCKS),
    "fp8-blocks-moe": Case("FP8, 128x128 blocks, experts", MOE, {**BLOCKS, "modules_to_not_convert": GATES}),
    "fp8-blocks-mla": Case("FP8, 128x128 blocks, MLA and experts (DeepSeek-V3)", MLA, BLOCKS, TP2_EP),
    "fp8-tensors": Case("FP8 per tensor, static activations", DENSE, TENSORS),
    "fp8-tensors-moe": Case("FP8 per tensor, static activations, experts", MOE, TENSORS),
    "compressed-fp8": Case("compressed-tensors FP8, channels and tokens", DENSE, CHANNELS),
    "compressed-fp8-moe": Case("compressed-tensors FP8, channels and tokens, experts", MOE, CHANNELS, TP2_EP),
    "compressed-int4": Case("compressed-tensors W4A16", DENSE, INT4),
    "compressed-int4-moe": Case("compressed-tensors W4A16, experts", MOE, INT4),
    "awq": Case("AWQ", DENSE, AWQ, TP2, {"dtype": "float16"}),
    "awq-moe": Case("AWQ, experts", MOE, {**AWQ, "modules_to_not_convert": ["mlp.gate"]}, TP2, {"dtype": "float16"}),
    "gptq": Case("GPTQ", DENSE, GPTQ, TP2, {"dtype": "float16"}),
    "gptq-act-order": Case("GPTQ, activation order", DENSE, {**GPTQ, "desc_act": True}, TP2, {"dtype": "float16"}),
    "gptq-moe": Case("GPTQ, experts", MOE, GPTQ, TP2, {"dtype": "float16"}),
    "mxfp4": Case("MXFP4 (gpt-oss)", GPT_OSS, None),
    "mxfp4-ep": Case("MXFP4 (gpt-oss), expert parallel", GPT_OSS, None, TP2_EP),
    "mtp": Case("none (BF16), MTP draft model", MLA, None, TP2_EP, {"speculative": {**ONE, "method": "mtp"}}),
    "mtp-fp8": Case(
        "FP8, 128x128 blocks, MTP draft model", MLA, BLOCKS, TP2_EP, {"speculative": {**ONE, "method": "mtp"}}
    ),
    "eagle": Case("none (BF16), EAGLE draft model", DENSE, None, TP2, {"speculative": {**ONE, "method": "eagle"}}),
    "draft": Case(
        "none (BF16), separate draft model", DENSE, None, TP2, {"speculative": {**ONE, "method": "draft_model"}}
    ),
    "online-fp8": Case("FP8 online (`--quantization fp8`)", DENSE, None, TP2, {"quantization": "fp8"}),
    "online-fp8-moe": Case("FP8 online (`--quantization fp8`), experts", MOE, None, TP2, {"quantization": "fp8"}),
}


def model_dir(case: Case, parent: Path) -> tuple[Path, list[SourceTensor], dict[str, Any]]:
    """The model directory, the manifest and the engine arguments of a case."""
    parent.mkdir(exist_ok=True, parents=True)
    if "speculative" in case.arguments:
        return _with_draft(case, parent)
    name, changes = case.base
    config = json.loads((oracle.CORPUS / "configs" / f"{name}.json").read_text()) | changes
    if case.config:
        config["quantization_config"] = case.config
    (parent / "config.json").write_text(json.dumps(config))
    return parent, manifest_from_config(parent), case.arguments


def _with_draft(case: Case, parent: Path) -> tuple[Path, list[SourceTensor], dict[str, Any]]:
    method = case.arguments["speculative"]["method"]
    config, entries = drafts.target(method, case.base[1] if case.config else None)
    speculative = dict(case.arguments["speculative"])
    found = drafts.draft(method)
    if found is not None:
        directory = parent / "draft"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(found[0]))
        speculative["model"] = str(directory)
        entries = [*entries, *(SourceTensor(f"draft.{e.name}", e.dtype, e.shape) for e in found[1])]
    if case.config:
        config["quantization_config"] = case.config
        entries = quantized(entries, {**case.config, "modules_to_not_convert": ["eh_proj"]})
    (parent / "config.json").write_text(json.dumps(config))
    return parent, entries, {**case.arguments, "speculative": speculative}


def materialize_meta_tensor(tensor: Any) -> Any:
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

    return materialize_meta_tensor(tensor)


def check(case: Case, target: str, parent: Path) -> dict[str, Any]:
    """Compile a case in this process and compare every rank: `status`, and what differs or why it is refused."""
    config_dir, entries, arguments = model_dir(case, parent)
    sources = oracle.finite_sources(entries)
    ranks = [oracle.Rank(config_dir, case.topology, p, arguments) for p in positions(case.topology)]
    try:
        plan = compile_plan(config_dir, entries, Fleet(topology=case.topology, target=target), jobs=1, **arguments)
    except RdtError as error:
        stock = _stock_error(ranks[0], sources)
        return {"status": "vllm" if stock else "refused", "reason": stock or f"{error.code}: {error.message}"}
    different: dict[str, int] = {}
    for rank, consumer in zip(ranks, plan.consumers, strict=True):
        wanted = _loaded(rank, lambda model: oracle.load_stock(model, sources))
        planned = _loaded(rank, _by_plan(consumer.program, plan.manifest, sources))
        for name in set(consumer.program.untouched) & set(wanted):
            as_it_was = (wanted[name] == oracle.STOCK_POISON).all() or not wanted[name].any()
            if as_it_was and (planned[name] == oracle.PLAN_POISON).all():
                del wanted[name], planned[name]
        different |= {f"{rank.position}: {n}": k for n, k in oracle.compare(wanted, planned).items()}
    return {
        "status": "different" if different else "exact",
        "tensors": different,
        "target": plan.compiler.target,
        "identity": plan.identity,
        "notes": list(plan.notes),
        "parameters": [
            [n, d, list(s)]
            for n, d, s in zip(
                *(getattr(plan.consumers[0].program.parameters, c) for c in ("names", "dtypes", "shapes")), strict=True
            )
        ],
    }


def _by_plan(program: Program, manifest: Any, sources: oracle.Sources) -> Callable[[torch.nn.Module], None]:
    return lambda model: oracle.load_planned(model, program, manifest, sources, "packed")


def _loaded(rank: oracle.Rank, load: Callable[[torch.nn.Module], None]) -> dict[str, torch.Tensor]:
    with rank.model() as model:
        _materialize(model)
        load(model)
        held = {*dict(model.named_parameters(remove_duplicate=False)), *dict(model.named_buffers())}
        return {name: data for name, data in oracle.snapshot(model).items() if name in held}


def _materialize(model: torch.nn.Module) -> None:
    """Memory for parameters that online quantization makes on meta, to have it layer by layer."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = materialize_meta_tensor(parameter)


def _stock_error(rank: oracle.Rank, sources: oracle.Sources) -> str:
    """What vLLM itself says about this model on this target; empty when it loads it."""
    try:
        _loaded(rank, lambda model: oracle.load_stock(model, sources))
    except Exception as error:
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {str(cause).splitlines()[0][:200]}"
    return ""


def run(target: str, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The outcomes of cases in this process, which becomes one of `target`."""
    platform.install(target)
    torch.set_num_threads(1)
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            yield name, check(CASES[name], target, Path(directory) / "model")


if __name__ == "__main__":
    for case_name, outcome in run(sys.argv[1], sys.argv[2:] or list(CASES)):
        print(json.dumps([case_name, outcome]), flush=True)
