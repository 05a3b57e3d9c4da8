"""Write the config and manifest of DeepSeek-V3 as its FP8 checkpoint has it (61 layers and one multi-token-prediction
layer, 256 experts, 128x128 blocks; 91,991 names, 688 GB of weights, none of them here).

    python tools/deepseek_v3.py DIRECTORY

gives `DIRECTORY/config.json` and `DIRECTORY/manifest.json`, the inputs of the figures in docs/targets.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LAYERS, DENSE, EXPERTS, HIDDEN, WIDTH, EXPERT_WIDTH, VOCABULARY = 61, 3, 256, 7168, 18432, 2048, 129280
HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 128, 1536, 512, 128, 64, 128
BLOCK = 128

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "dtype": "bfloat16",
    "first_k_dense_replace": DENSE,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "kv_lora_rank": KV_RANK,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": EXPERT_WIDTH,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": 8,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": Q_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": VALUE,
    "vocab_size": VOCABULARY,
}

Row = tuple[str, str, list[int]]


def manifest(layers: int = LAYERS, experts: int = EXPERTS) -> list[Row]:
    """`(name, dtype, shape)` of every tensor, in checkpoint order."""
    rows: list[Row] = [("model.embed_tokens.weight", "bfloat16", [VOCABULARY, HIDDEN])]
    for layer in range(layers + 1):
        rows += _layer(f"model.layers.{layer}.", experts if layer >= DENSE else 0)
        if layer == layers:
            rows += _prediction(f"model.layers.{layer}.")
    return [
        *rows,
        ("model.norm.weight", "bfloat16", [HIDDEN]),
        ("lm_head.weight", "bfloat16", [VOCABULARY, HIDDEN]),
    ]


def _layer(prefix: str, experts: int) -> list[Row]:
    a = f"{prefix}self_attn."
    rows: list[Row] = [
        *_linear(f"{a}q_a_proj", Q_RANK, HIDDEN),
        (f"{a}q_a_layernorm.weight", "bfloat16", [Q_RANK]),
        *_linear(f"{a}q_b_proj", HEADS * (NOPE + ROPE), Q_RANK),
        *_linear(f"{a}kv_a_proj_with_mqa", KV_RANK + ROPE, HIDDEN),
        (f"{a}kv_a_layernorm.weight", "bfloat16", [KV_RANK]),
        *_linear(f"{a}kv_b_proj", HEADS * (NOPE + VALUE), KV_RANK),
        *_linear(f"{a}o_proj", HIDDEN, HEADS * VALUE),
    ]
    if experts:
        rows.append((f"{prefix}mlp.gate.weight", "bfloat16", [experts, HIDDEN]))
        rows.append((f"{prefix}mlp.gate.e_score_correction_bias", "float32", [experts]))
        names = [*(f"{prefix}mlp.experts.{expert}" for expert in range(experts)), f"{prefix}mlp.shared_experts"]
        for name in names:
            rows += _mlp(name, EXPERT_WIDTH)
    else:
        rows += _mlp(f"{prefix}mlp", WIDTH)
    norms = ("input_layernorm", "post_attention_layernorm")
    return [*rows, *((f"{prefix}{norm}.weight", "bfloat16", [HIDDEN]) for norm in norms)]


def _prediction(prefix: str) -> list[Row]:
    """What a multi-token-prediction layer has beside a decoder layer: copies of the embedding and head among it."""
    return [
        (f"{prefix}embed_tokens.weight", "bfloat16", [VOCABULARY, HIDDEN]),
        (f"{prefix}enorm.weight", "bfloat16", [HIDDEN]),
        (f"{prefix}hnorm.weight", "bfloat16", [HIDDEN]),
        (f"{prefix}eh_proj.weight", "bfloat16", [HIDDEN, 2 * HIDDEN]),
        (f"{prefix}shared_head.norm.weight", "bfloat16", [HIDDEN]),
        (f"{prefix}shared_head.head.weight", "bfloat16", [VOCABULARY, HIDDEN]),
    ]


def _mlp(name: str, width: int) -> list[Row]:
    return [
        *_linear(f"{name}.gate_proj", width, HIDDEN),
        *_linear(f"{name}.up_proj", width, HIDDEN),
        *_linear(f"{name}.down_proj", HIDDEN, width),
    ]


def _linear(name: str, outputs: int, inputs: int) -> list[Row]:
    """An FP8 weight and the scales of its blocks."""
    blocks = [-(-outputs // BLOCK), -(-inputs // BLOCK)]
    return [
        (f"{name}.weight", "float8_e4m3fn", [outputs, inputs]),
        (f"{name}.weight_scale_inv", "float32", blocks),
    ]


def write(directory: Path, layers: int = LAYERS, experts: int = EXPERTS) -> None:
    """Write both files, for the full model or a smaller one of the same form."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "num_hidden_layers": layers, "n_routed_experts": experts}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "manifest.json").write_text(json.dumps(manifest(layers, experts)))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
