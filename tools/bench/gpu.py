"""rdtexec beside vLLM's in-process weight transfer (`sharded_rdt`, the peer), inside vLLM and Ray, on GPUs.

    python tools/bench/gpu.py [--layers 4] [--syncs 6] [--transports local,nixl] [--no-peer] [--apart] [--gathered]
                              [--quantization fp8]

The model is a Qwen3 mixture of experts with the layer shapes of Qwen3-30B-A3B and `--layers` of its 48 layers; with
`--tiny` a small one of the same form. Every system is a real vLLM engine in a Ray actor (the worker is that process)
and one trainer process that holds the weights on its GPU, driven through vLLM's own Ray client. All start from dummy
weights and are synced in turn: peer, local, nixl, peer, ... with weights that change every time. Engine and trainer
share a GPU, or, with `--apart`, the engines are on the second. The peer adds a producer process of its own.

After every sync everything that the kernels read, and after the first and the last greedy tokens and their logprobs
too, must equal those of a fresh engine that loaded the same checkpoint; if not, the exit status is 1. `x plain` is the
time of a sync over that of copying the same bytes in one piece between the same GPUs. Ratios are peer/ours.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Ray and its workers inherit these: no GPU is counted or hidden, vLLM works in the actor's own process.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
} | dict(os.environ)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
)
sys.path.insert(0, os.environ["PYTHONPATH"].split(os.pathsep)[0])

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from gpu_actors import NAMESPACE, PEER, Engine, Trainer

LARGE = {"hidden": 2048, "experts": 128, "expert_mlp": 768, "heads": 32, "kv_heads": 4, "vocabulary": 32768}
TINY = {"hidden": 256, "experts": 8, "expert_mlp": 128, "heads": 4, "kv_heads": 2, "vocabulary": 1024}


def write_config(directory: Path, size: dict[str, int], layers: int) -> dict[str, tuple[int, ...]]:
    """`config.json` of the model; its source names and their shapes, layer by layer."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": size["hidden"],
        "intermediate_size": 6144,
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "moe_intermediate_size": size["expert_mlp"],
        "norm_topk_prob": True,
        "num_attention_heads": size["heads"],
        "num_experts": size["experts"],
        "num_experts_per_tok": min(8, size["experts"] // 2),
        "num_hidden_layers": layers,
        "num_key_value_heads": size["kv_heads"],
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": size["vocabulary"],
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    hidden, mlp, q, kv = size["hidden"], size["expert_mlp"], size["heads"] * 128, size["kv_heads"] * 128
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size["vocabulary"], hidden)}
    for layer in range(layers):
        of_layer = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "self_attn.q_norm": (128,),
            "self_attn.k_norm": (128,),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate": (size["experts"], hidden),
        }
        for expert in range(size["experts"]):
            of_layer[f"mlp.experts.{expert}.gate_proj"] = (mlp, hidden)
            of_layer[f"mlp.experts.{expert}.up_proj"] = (mlp, hidden)
            of_layer[f"mlp.experts.{expert}.down_proj"] = (hidden, mlp)
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (size["vocabulary"], hidden)}


class System:
    """The peer, or rdtexec over one transport, and what was measured on it."""

    def __init__(self, name: str, engine: Any) -> None:
        self.name, self.engine = name, engine
        self.init: dict[str, float] = {}
        self.syncs: list[dict[str, float]] = []


def start_engine(checkpoint: Path, backend: str, options: dict[str, Any], gpus: str) -> Any:
    settings: dict[str, Any] = {"num_cpus": 0, "namespace": NAMESPACE, "enable_tensor_transport": True}
    environment = {"CUDA_VISIBLE_DEVICES": gpus, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # functions go to workers
    settings["runtime_env"] = {"env_vars": environment}
    engine: Any = ray.remote(Engine).options(**settings)
    return engine.remote(str(checkpoint), backend, options)


def measure(systems: Sequence[System], trainer: Any, plan: Path, syncs: int, fresh: dict[int, Any]) -> list[str]:
    """Init every system, then sync them in turn; what was wrong."""
    wrong: list[str] = []
    for system in systems:
        system.init = ray.get(trainer.init.remote(system.name, str(plan)))
        print(f"{system.name}: init {system.init}", flush=True)
    addresses = {s.name: ray.get(s.engine.kernel_addresses.remote()) for s in systems}
    for number in range(1 + syncs):
        seed = number % 2
        for system in systems:
            ray.get(trainer.train.remote(seed))
            found = ray.get(trainer.sync.remote(system.name))
            if system.name != PEER:
                found |= {f"worker_{k}": v for k, v in ray.get(system.engine.report.remote()).items()}
            system.syncs.append(found)
            state, answers = fresh[seed]
            have = ray.get(system.engine.kernel_state.remote())
            different = sorted(n for n in have | state if have.get(n) != state.get(n))
            where = f"{system.name}, sync {number}"
            if different:
                wrong.append(f"{where}: {len(different)} of {len(state)} tensors differ, first {different[:3]}")
            if ray.get(system.engine.kernel_addresses.remote()) != addresses[system.name]:
                wrong.append(f"{where}: kernel tensors moved")
            if number in (0, syncs) and ray.get(system.engine.answers.remote()) != answers:
                wrong.append(f"{where}: tokens or logprobs differ from those of a fresh engine")
            print(f"{where}: " + " ".join(f"{k} {v * 1e3:.1f}" for k, v in found.items()), flush=True)
    return wrong


Row = tuple[str, Callable[[System], float | None]]


def later(key: str, of: Callable[[list[float]], float] = statistics.median) -> Callable[[System], float | None]:
    """Over the later syncs, for systems that have the figure."""
    return lambda s: of([sync[key] for sync in s.syncs[1:]]) if key in s.syncs[-1] else None


ROWS: tuple[Row, ...] = (
    ("init", lambda s: s.init["wall"]),
    ("  in the worker", lambda s: s.init.get("worker_init")),
    ("first sync", lambda s: s.syncs[0]["wall"]),
    ("later syncs, median", later("wall")),
    ("  fastest", later("wall", min)),
    ("  start_weight_update", later("start")),
    ("  update_weights", later("update")),
    ("  finish_weight_update", later("finish")),
)


def print_table(systems: Sequence[System], plain_s: float, nbytes: int) -> None:
    """One row a figure, in milliseconds, with the ratio peer/ours beside each of ours."""
    peer = next((s for s in systems if s.name == PEER), None)
    head = f"{'milliseconds':<26}" + "".join(f"{s.name:>10}{'' if s is peer else '   ratio'}" for s in systems)
    print(f"\n{head}\n{'-' * len(head)}")
    for label, figure in ROWS:
        line = f"{label:<26}"
        for system in systems:
            value, theirs = figure(system), figure(peer) if peer else None
            line += f"{value * 1e3:>10.1f}" if value is not None else f"{'-':>10}"
            if system is not peer:
                line += f"{theirs / value:>7.2f}x" if theirs and value else f"{'':>8}"
        print(line)
    line = f"{'x plain':<26}"
    rate = f"{'GB/s':<26}"
    for system in systems:
        wall = statistics.median(sync["wall"] for sync in system.syncs[1:])
        line += f"{wall / plain_s:>10.1f}{'' if system is peer else ' ' * 8}"
        rate += f"{nbytes / wall / 1e9:>10.1f}{'' if system is peer else ' ' * 8}"
    print(f"{line}\n{rate}\nplain copy of {nbytes / 1e9:.2f} GB: {plain_s * 1e3:.2f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--syncs", type=int, default=6, help="syncs after the first")
    parser.add_argument("--transports", default="local,nixl")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--apart", action="store_true", help="engines on the second GPU")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="workers of an engine, from the first GPU on")
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--gathered", action="store_true", help="the trainer yields copies, as an all-gather would")
    parser.add_argument("--engine-options", default="{}", help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--quantization", help="as vLLM takes it; fp8 quantizes while loading")
    parser.add_argument("--plan", help="a fleet plan for this model, instead of compiling one")
    parser.add_argument("--json", help="write all figures to this file")
    args = parser.parse_args()
    options = json.loads(args.engine_options) | ({"quantization": args.quantization} if args.quantization else {})
    workers = args.tensor_parallel
    if workers > 1:
        options |= {"tensor_parallel_size": workers, "enable_expert_parallel": args.expert_parallel}
    with tempfile.TemporaryDirectory(prefix="rdtplan-bench-") as scratch:
        work = Path(scratch)
        shapes = write_config(work / "0", TINY if args.tiny else LARGE, args.layers)
        write_config(work / "1", TINY if args.tiny else LARGE, args.layers)
        (work / "manifest.json").write_text(json.dumps([[n, "bfloat16", list(s)] for n, s in shapes.items()]))
        started = time.perf_counter()
        plan = Path(args.plan or work / "fleet.plan")
        command = [sys.executable, "-m", "rdtplan.cli", "compile", str(work / "0")]
        command += ["--manifest", str(work / "manifest.json"), "-o", str(plan)]
        command += ["--tp", str(workers), *(["--ep"] if args.expert_parallel else [])]
        command += ["--quantization", args.quantization] if args.quantization else []
        compiling = None if args.plan else subprocess.Popen(command)
        ray.init(num_cpus=16, num_gpus=0, include_dashboard=False, namespace=NAMESPACE, log_to_driver=True)
        gpus = "1,0" if args.apart else ",".join(map(str, range(workers)))
        names = [*([] if args.no_peer else [PEER]), *args.transports.split(",")]
        backends = {name: "sharded_rdt" if name == PEER else "rdtexec" for name in names}
        systems = [System(name, start_engine(work / "0", backends[name], options, gpus)) for name in names]
        trainer: Any = (
            ray.remote(Trainer)
            .options(num_cpus=0, namespace=NAMESPACE)
            .remote(str(work / "manifest.json"), {s.name: s.engine for s in systems}, workers, gathered=args.gathered)
        )
        nbytes = ray.get(trainer.nbytes.remote())
        for seed in (0, 1):
            ray.get(trainer.save.remote(str(work / str(seed)), seed))
        plain_s = ray.get(trainer.plain_copy.remote(1 if args.apart else 0))
        if compiling is not None:
            if compiling.wait():
                sys.exit("no plan could be compiled")
            print(f"plan compiled {time.perf_counter() - started:.1f} s after the start", flush=True)
        fresh: dict[int, Any] = {}
        judges = {seed: start_engine(work / str(seed), "", options, gpus) for seed in (0, 1)}
        for seed, engine in judges.items():
            print(ray.get(engine.ready.remote()), flush=True)
            fresh[seed] = ray.get([engine.kernel_state.remote(), engine.answers.remote()])
            ray.kill(engine)
        assert fresh[0][1] != fresh[1][1], "the two checkpoints answer alike"
        for system in systems:
            ray.get(system.engine.ready.remote())
        print(f"engines ready {time.perf_counter() - started:.1f} s after the start", flush=True)
        wrong = measure(systems, trainer, plan, args.syncs, fresh)
        print_table(systems, plain_s, nbytes)
        peak = {s.name: ray.get(s.engine.peak_memory.remote()) for s in systems}
        print("peak memory of the engine's tensors, GB: " + str({k: round(v / 1e9, 2) for k, v in peak.items()}))
        print(f"compared after every sync: {len(fresh[0][0])} tensors; wrong: {wrong or 'nothing'}", flush=True)
        if args.json:
            of = {s.name: {"init": s.init, "syncs": s.syncs, "peak_memory": peak[s.name]} for s in systems}
            Path(args.json).write_text(json.dumps({"bytes": nbytes, "plain_s": plain_s, "wrong": wrong, "systems": of}))
        ray.get(trainer.shutdown.remote())
        ray.shutdown()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
