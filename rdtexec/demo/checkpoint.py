"""A small random Qwen3-MoE checkpoint. Weights are random *bytes*, every bit pattern, so that nothing hides in
rounding."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, EXPERTS, HIDDEN, EXPERT_WIDTH, VOCABULARY = 4, 8, 512, 256, 1000
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "moe_intermediate_size": EXPERT_WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        shapes |= {
            p + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            p + "self_attn.q_norm.weight": (HEAD_DIM,),
            p + "self_attn.k_norm.weight": (HEAD_DIM,),
            p + "input_layernorm.weight": (HIDDEN,),
            p + "post_attention_layernorm.weight": (HIDDEN,),
            p + "mlp.gate.weight": (EXPERTS, HIDDEN),
        }
        for expert in range(EXPERTS):
            e = f"{p}mlp.experts.{expert}."
            shapes |= {
                e + "gate_proj.weight": (EXPERT_WIDTH, HIDDEN),
                e + "up_proj.weight": (EXPERT_WIDTH, HIDDEN),
                e + "down_proj.weight": (HIDDEN, EXPERT_WIDTH),
            }
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    return shapes


def write_checkpoint(directory: Path, seed: int) -> None:
    """Write `config.json` and `model.safetensors` with bytes drawn from `seed`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in _shapes().items():
        numel = 1
        for n in shape:
            numel *= n
        raw = torch.randint(0, 256, (2 * numel,), dtype=torch.uint8, generator=generator)
        tensors[name] = raw.view(torch.bfloat16).view(shape)
    save_file(tensors, str(directory / "model.safetensors"))


OWNERS = f"""# Two pipeline stages: trainer rank 0 holds the first half of the layers, rank 1 the rest.
[[own]]
names = "model.embed_tokens.*"
ranks = [0]

[[own]]
layers = "0-{LAYERS // 2 - 1}"
ranks = [0]

[[own]]
names = "*"
ranks = [1]
"""
