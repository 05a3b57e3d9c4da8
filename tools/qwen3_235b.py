"""Write the config and manifest of Qwen3-235B-A22B (94 layers, 128 experts, 36,945 names, 470 GB of weights, none of
them here).

    python tools/qwen3_235b.py DIRECTORY

gives `DIRECTORY/config.json` and `DIRECTORY/manifest.json`, the inputs of the figures in docs/performance.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LAYERS, EXPERTS, HIDDEN, EXPERT_WIDTH, VOCABULARY = 94, 128, 4096, 1536, 151936
HEADS, KV_HEADS, HEAD_DIM = 64, 4, 128

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": EXPERT_WIDTH,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}


def manifest(layers: int = LAYERS, experts: int = EXPERTS) -> list[tuple[str, str, list[int]]]:
    """`(name, dtype, shape)` of every tensor, in checkpoint order."""
    rows: list[tuple[str, list[int]]] = [("model.embed_tokens.weight", [VOCABULARY, HIDDEN])]
    for layer in range(layers):
        p = f"model.layers.{layer}."
        rows += [
            (p + "self_attn.q_proj.weight", [HEADS * HEAD_DIM, HIDDEN]),
            (p + "self_attn.k_proj.weight", [KV_HEADS * HEAD_DIM, HIDDEN]),
            (p + "self_attn.v_proj.weight", [KV_HEADS * HEAD_DIM, HIDDEN]),
            (p + "self_attn.o_proj.weight", [HIDDEN, HEADS * HEAD_DIM]),
            (p + "self_attn.q_norm.weight", [HEAD_DIM]),
            (p + "self_attn.k_norm.weight", [HEAD_DIM]),
            (p + "input_layernorm.weight", [HIDDEN]),
            (p + "post_attention_layernorm.weight", [HIDDEN]),
            (p + "mlp.gate.weight", [experts, HIDDEN]),
        ]
        for expert in range(experts):
            e = f"{p}mlp.experts.{expert}."
            rows += [
                (e + "gate_proj.weight", [EXPERT_WIDTH, HIDDEN]),
                (e + "up_proj.weight", [EXPERT_WIDTH, HIDDEN]),
                (e + "down_proj.weight", [HIDDEN, EXPERT_WIDTH]),
            ]
    rows += [("model.norm.weight", [HIDDEN]), ("lm_head.weight", [VOCABULARY, HIDDEN])]
    return [(name, "bfloat16", shape) for name, shape in rows]


def write(directory: Path, layers: int = LAYERS, experts: int = EXPERTS) -> None:
    """Write both files, for the full model or a smaller one of the same form."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "num_hidden_layers": layers, "num_experts": experts}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "manifest.json").write_text(json.dumps(manifest(layers, experts)))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
