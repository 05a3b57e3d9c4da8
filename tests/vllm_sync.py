"""Models through vLLM in this process: syncs over each transport, held to fresh engines. Prints a JSON line.

usage: python tests/vllm_sync.py DIRECTORY CORPUS_NAME ...

A script and not a test, because vLLM keeps state of the process (process groups, the current platform), and because
`VLLM_ENABLE_V1_MULTIPROCESSING=0` must be set before it is imported.
"""

from __future__ import annotations

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

import gc
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from rdtexec.vllm.clients import ReplicaClient

CORPUS = Path(__file__).parent / "corpus"
PROMPTS = ([1, 2, 3, 4, 5], [100, 200, 250, 17, 23, 42, 7])


def write_checkpoint(name: str, directory: Path, seed: int) -> Path:
    """A random checkpoint of one corpus model, complete enough for vLLM to load."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text((CORPUS / f"configs/{name}.json").read_text())
    rng = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for weight, dtype, shape in json.loads((CORPUS / f"manifests/{name}.json").read_text()):
        values = torch.randn(shape, generator=rng) * (0.1 if len(shape) > 1 else 0.2)
        weights[weight] = (values + (1 if "norm" in weight else 0)).to(getattr(torch, dtype))
    save_file(weights, str(directory / "model.safetensors"))
    return directory


def compile_plan(checkpoint: Path, output: Path, *options: str) -> str:
    """`rdtplan compile`, in this process: vLLM is imported already. The manifest is the trainer's, in its order."""
    from rdtplan.cli import main
    from rdtplan.inputs.manifests import from_weight_source, to_json

    manifest = output.with_suffix(".json")
    manifest.write_bytes(to_json(from_weight_source(CheckpointSource(checkpoint))))
    arguments = ["compile", str(checkpoint), "--manifest", str(manifest), "-o", str(output), "--jobs", "1", *options]
    assert not main(arguments, standalone_mode=False), f"no plan for {checkpoint}"
    return str(output)


def for_target(plan: str, output: Path, target: str) -> str:
    """The same plan with another target in its header: parameters that fit do not make it one for this platform."""
    import rdtplan
    from rdtplan.ir.digests import fleet_identity

    loaded = rdtplan.load(plan)
    changed = evolve(loaded, compiler=evolve(loaded.compiler, target=target))
    rdtplan.save(evolve(changed, identity=fleet_identity(changed)), output)
    return str(output)


class CheckpointSource(WeightSource):
    """A trainer whose weights are those of a checkpoint; `use` is its training step."""

    def __init__(self, checkpoint: Path) -> None:
        self.use(checkpoint)

    broken = False

    def use(self, checkpoint: Path) -> None:
        self.weights = load_file(str(checkpoint / "model.safetensors"))

    def declared(self) -> list[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.weights.items()]

    metadata = cached_property(declared) if hasattr(WeightSource, "iter_full") else declared  # vLLM 0.33, or 0.32

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(self.weights.items()):
            if self.broken and number == 3:
                raise ValueError("the trainer's gather broke")
            yield item

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.iter_full()


class InProcessClient:
    """A VLLMWeightSyncClient of an `LLM` in this process. `extra` is laid over the init info."""

    def __init__(self, llm: Any, **extra: Any) -> None:
        self.llm, self.extra = llm, extra
        self.init_info: dict[str, Any] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.init_info = init_info | self.extra
        self.llm.init_weight_transfer_engine({"init_info": self.init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update()


class SilentClient(InProcessClient):
    """As vLLM's HTTP client: when a worker refuses, its reason stays with the server."""

    reason = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.reason = refusal(lambda: InProcessClient.init_weight_transfer_engine(self, init_info))
        if self.reason:
            raise RuntimeError("500 Server Error")


def engine(checkpoint: Path, **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        seed=0,
        dtype="bfloat16",
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        **options,
    )


def generate(llm: Any) -> list[Any]:
    """Greedy tokens, and the logprobs of the best three at every step."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], how, use_tqdm=False)
    return [
        (list(a.outputs[0].token_ids), [sorted((k, v.logprob) for k, v in d.items()) for d in a.outputs[0].logprobs])
        for a in answers
    ]


@torch.no_grad()
def kernel_state(llm: Any) -> dict[str, str]:
    """A digest of everything the kernels read: parameters, buffers, and the weights packed away in linear layers.

    vLLM's CPU linear layers keep their weight inside a kernel handle; the identity matrix gets it out exactly.
    """

    def digest(model: torch.nn.Module) -> dict[str, str]:
        found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        found |= dict(model.named_buffers(remove_duplicate=False))
        for name, module in model.named_modules():
            inputs = getattr(module, "input_size_per_partition", getattr(module, "input_size", None))
            if inputs and hasattr(module, "cpu_linear"):
                eye = torch.eye(inputs, dtype=module.weight.dtype)
                found[f"{name}.packed"] = module.cpu_linear(eye, module.weight, None)
        return {
            name: f"{t.dtype} {tuple(t.shape)} {hashlib.sha256(_bytes(t)).hexdigest()}" for name, t in found.items()
        }

    return llm.apply_model(digest)[0]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def kernel_addresses(llm: Any) -> dict[str, int]:
    """Where the kernels' tensors lie: a sync must not move them, CUDA graphs hold the addresses."""

    def addresses(model: torch.nn.Module) -> dict[str, int]:
        both = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {name: t.data_ptr() for name, t in both}

    return llm.apply_model(addresses)[0]


def process_state(llm: Any) -> dict[str, Any]:
    """What building and tracing another model in this process could disturb, and must not."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.models import utils
    from vllm.model_executor.offloader import get_offloader

    def of_worker(worker: Any) -> dict[str, Any]:
        config = worker.vllm_config
        layers = config.compilation_config.static_forward_context
        return {
            "config": (id(config.model_config), str(config.model_config.hf_config), str(config.quant_config)),
            "compilation": str(config.compilation_config),
            "layers": {name: id(layer) for name, layer in layers.items()},
        }

    return {
        "worker": llm.collective_rpc(of_worker),
        "addresses": kernel_addresses(llm),
        "bytes": kernel_state(llm),
        "modules": llm.apply_model(lambda model: [(name, id(m)) for name, m in model.named_modules()]),
        "random": (torch.random.get_rng_state().tolist(), torch.get_default_dtype()),
        "rope": {str(key): id(module) for key, module in rotary_embedding._ROPE_DICT.items()},
        "missing": {key: list(names) for key, names in utils._model_to_pp_missing_layer_names.items()},
        "globals": (id(get_offloader()), id(get_current_vllm_config_or_none()), gc.isenabled()),
    }


def refusal(action: Callable[[], Any]) -> str:
    """Code and message of the error that `action` raises; an empty string when it raises none."""
    try:
        action()
    except Exception as error:
        return f"{getattr(error, 'code', type(error).__name__)} {error}"
    return ""


class Trial:
    """One model: checkpoints A, B and C, what fresh engines make of A and B, and an engine that started with C."""

    def __init__(self, name: str, directory: Path) -> None:
        """Only checkpoints and plans: a process with a live engine cannot trace."""
        self.directory = directory
        self.moe = "Moe" in name or "Deepseek" in name
        self.checkpoints = {seed: write_checkpoint(name, directory / seed, ord(seed)) for seed in "ABC"}
        self.plan = compile_plan(self.checkpoints["A"], directory / "fleet.plan")
        self.lifecycle = name == "LlamaForCausalLM"
        self.live = name in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM@mla")
        if self.lifecycle:
            other = write_checkpoint("LlamaForCausalLM@headbias", directory / "other", 1)
            self.wrong_model = compile_plan(other, directory / "other.plan")
            self.wrong_layout = compile_plan(self.checkpoints["A"], directory / "tp2.plan", "--tp", "2")
            self.wrong_target = for_target(self.plan, directory / "sm90.plan", "sm90")

    def start(self) -> None:
        """Run the fresh engines, then start the one to be synced."""
        from vllm.config import WeightTransferConfig

        self.tokens: dict[str, list[Any]] = {}
        self.state: dict[str, dict[str, str]] = {}
        for seed in "AB":
            llm = engine(self.checkpoints[seed])
            self.tokens[seed], self.state[seed] = generate(llm), kernel_state(llm)
            del llm
            gc.collect()
        self.llm = engine(self.checkpoints["C"], weight_transfer_config=WeightTransferConfig(backend="rdtexec"))
        self.source = CheckpointSource(self.checkpoints["A"])
        self.addresses: dict[str, int] = {}
        self.client = InProcessClient(self.llm)

    def trainer(self, **options: Any) -> Any:
        from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo

        info = RdtExecTrainerInitInfo(rank=0, **{"plan": self.plan, **options})
        return RdtExecTrainer.trainer_init(info, client=self.client, source=self.source)

    def sync(self, trainer: Any, seed: str) -> dict[str, Any]:
        """One sync to a checkpoint; how the result differs from a fresh engine's."""
        self.source.use(self.checkpoints[seed])
        if not self.addresses:  # once: after a failed sync the model is in checkpoint format
            self.addresses = kernel_addresses(self.llm)
        started = time.perf_counter()
        trainer.send_weights()
        seconds = time.perf_counter() - started
        self.llm.reset_prefix_cache()
        tokens, state = generate(self.llm), kernel_state(self.llm)
        return {
            "checkpoint": seed,
            "seconds": round(seconds, 3),
            "generation_equal": tokens == self.tokens[seed],
            "different": sorted(n for n in state | self.state[seed] if state.get(n) != self.state[seed].get(n)),
            "compared": len(state),
            "moved": sorted(n for n, p in kernel_addresses(self.llm).items() if self.addresses.get(n) != p),
        }


def try_transports(trial: Trial) -> dict[str, Any]:
    """Five syncs over each transport; the second trainer's init re-initializes the running engine."""
    found: dict[str, Any] = {}
    for transport in ("local", "nixl"):
        trainer = trial.trainer(transport=transport, repair_reload=trial.moe)
        found[transport] = [trial.sync(trainer, seed) for seed in "ABABA"]
        trainer.shutdown()
    return found


def try_live_compile(trial: Trial) -> dict[str, Any]:
    """No plan file: refused plans first, which leave nothing behind; then one that is the command line's, and syncs."""
    trial.client = client = SilentClient(trial.llm)
    saved = trial.directory / "live.plan"
    options = {"plan": "", "repair_reload": trial.moe, "transport": "local", "save_plan": str(saved)}

    def attempt(**changes: Any) -> dict[str, Any]:
        tokens, before = generate(trial.llm), process_state(trial.llm)
        client.reason = ""
        reason = refusal(lambda: trial.trainer(**(options | changes)))
        after = process_state(trial.llm)
        changed = [key for key in before if before[key] != after[key]]
        changed += [] if generate(trial.llm) == tokens else ["answers"]
        return {"trainer": reason, "worker": client.reason, "changed": changed}

    weights = trial.source.weights
    found: dict[str, Any] = {"refused": {}}
    trial.source.weights = weights | {"model.layers.0.strange.weight": torch.zeros(2)}
    found["refused"]["unknown name"] = attempt()
    first, *_, last = weights
    trial.source.weights = {name: t for name, t in weights.items() if name != last}
    found["refused"]["missing name"] = attempt()
    trial.source.weights = weights | {first: weights[first][1:]}
    found["refused"]["other shape"] = attempt()
    trial.source.weights = weights
    found["refused"]["bad settings"] = attempt(num_rdt_buffers=0, waive=("RDT310:x",))
    found["refused"]["settings of no plan"] = attempt(stall_timeout_s=-1, save_plan=str(trial.directory / "no/plan"))
    found["nothing saved"] = not saved.exists()

    state = process_state(trial.llm)
    trainer = trial.trainer(**options)
    found["changed"] = [key for key, value in process_state(trial.llm).items() if value != state[key]]
    found["same bytes"] = saved.read_bytes() == Path(trial.plan).read_bytes()
    good = [_right(trial.sync(trainer, seed)) for seed in "AB"]
    client.init_weight_transfer_engine(trainer.init_payload(0))  # rejoins: the plan is there by now
    good.append(_right(trial.sync(trainer, "A")))
    again = trial.trainer(**options)  # a re-init, while the first one's connection works
    trainer.shutdown()
    good.append(_right(trial.sync(again, "B")))
    again.shutdown()
    trainer = trial.trainer(**(options | {"plan": str(saved), "save_plan": ""}))
    good.append(_right(trial.sync(trainer, "A")))
    trainer.shutdown()
    trial.client = InProcessClient(trial.llm)
    return found | {"good": good}


def try_faulty_reload(trial: Trial) -> dict[str, Any]:
    """Without `repair_reload` a model that vLLM would reload wrongly is refused, and serves on unchanged."""
    tokens, state = generate(trial.llm), kernel_state(trial.llm)
    reason = refusal(lambda: trial.trainer(transport="local"))
    return {"reason": reason, "unchanged": generate(trial.llm) == tokens and kernel_state(trial.llm) == state}


def finish(worker: Any) -> None:
    """Ask the engine itself: vLLM's own state check refuses first when it sees the failure."""
    worker.weight_transfer_engine.finish_weight_update()


def start_and(trial: Trial, end: Callable[[], Any]) -> str:
    """Why an update in which nothing is sent cannot be ended so; vLLM is left without an update."""
    trial.client.start_weight_update()
    try:
        return refusal(end)
    finally:
        assert refusal(lambda: trial.client.update_weights({"abandon": True})).startswith(("RDT632", "RuntimeError"))


def try_replicas(trial: Trial) -> str:
    """Two replicas, of which one is dead: the other begins an update and abandons it."""

    class Dead:
        def start_weight_update(self) -> None:
            raise ConnectionError("nobody listens")

    return refusal(ReplicaClient([trial.client, Dead()]).start_weight_update)


def try_recovery(trial: Trial) -> dict[str, Any]:
    """A trainer whose source fails halfway: both ends say so, the update cannot be finished, and the next one heals."""
    trainer = trial.trainer(transport="local", repair_reload=trial.moe)
    trial.sync(trainer, "A")
    trial.source.use(trial.checkpoints["B"])
    last = list(trial.source.weights)[-1]
    trial.source.weights[last] = trial.source.weights[last].float()
    found = {
        "broken": refusal(trainer.send_weights),
        "finish": refusal(lambda: trial.llm.collective_rpc(finish)),
        "start and finish": start_and(trial, lambda: trial.llm.collective_rpc(finish)),
        "start and abandon": start_and(trial, lambda: trial.client.update_weights({"abandon": True})),
        "a dead replica": try_replicas(trial),
        "again": refusal(trainer.send_weights),
    }
    found["mended"] = [trial.sync(trainer, seed) for seed in "BA"]
    trainer.shutdown()
    trainer = trial.trainer(transport="local", repair_reload=trial.moe)
    found["after a new init"] = [trial.sync(trainer, seed) for seed in "BA"]
    trainer.shutdown()
    return found


def try_lifecycle(trial: Trial) -> dict[str, Any]:
    """Refused inits and syncs on an engine that has a working connection, which must go on working."""
    found: dict[str, Any] = {"refused": {}, "unchanged": {}, "works_after": {}}
    no_init = refusal(trial.llm.start_weight_update)

    trainer = trial.trainer(transport="local")
    good = trial.client.init_info
    trial.sync(trainer, "A")

    def init(**changes: Any) -> None:
        trial.llm.init_weight_transfer_engine({"init_info": good | changes})

    def update(index: Any) -> None:
        trial.client.start_weight_update()
        trial.client.update_weights({"sync_idx": index})

    attempts: dict[str, Callable[[], Any]] = {
        "another model's plan": lambda: init(plan=trial.wrong_model),
        "another layout's plan": lambda: init(plan=trial.wrong_layout),
        "another platform's plan": lambda: init(plan=trial.wrong_target),
        "no such plan": lambda: init(plan=str(trial.directory / "none.plan")),
        "wrong key": lambda: init(authkey="00" * 32),
        "wrong transport": lambda: init(transport="nixl"),
        "many wrong values": lambda: init(
            transport="pigeon", producers={"x": "y"}, authkey="z", stall_timeout_s=0, replica_rank=3, num_consumers=7
        ),
        "many wrong types": lambda: init(
            transport=3,
            producers=["x"],
            authkey=None,
            stall_timeout_s="5",
            num_replicas=1.5,
            repair_reload=1,
            plan=True,
        ),
        "no address": lambda: init(producers={"0": ["127.0.0.1"]}),
        "two ways to a plan": lambda: init(compile_at="/tmp/socket", metrics_port=1 << 16),
        "unknown setting": lambda: init(colour="red"),
        "index -2": lambda: update(-2),
        "index as text": lambda: update("3"),
        "index as bool": lambda: update(True),
    }
    for name, attempt in attempts.items():
        found["refused"][name] = refusal(attempt)
        found["unchanged"][name] = (
            generate(trial.llm) == trial.tokens["A"] and kernel_state(trial.llm) == trial.state["A"]
        )
        found["works_after"][name] = _right(trial.sync(trainer, "B")) and _right(trial.sync(trainer, "A"))
    found["refused"]["not initialized"] = no_init

    init(plan=trial.plan)
    found["plan by path"] = _right(trial.sync(trainer, "B"))
    init()
    found["plan from the producer"] = _right(trial.sync(trainer, "A"))
    trainer.shutdown()
    trial.client.extra = {"plan": trial.wrong_model}
    found["refused"]["another model's plan, at first"] = refusal(lambda: trial.trainer(transport="nixl"))
    trial.client.extra = {}
    trainer = trial.trainer(transport="nixl")
    found["right plan after a wrong one"] = _right(trial.sync(trainer, "B"))
    trainer.shutdown()
    return found


def try_operations(trial: Trial) -> dict[str, Any]:
    """What a user does besides syncs: proofs, statistics, live consumers, rejoining; and what may fail on the way."""
    found: dict[str, Any] = {}
    stats = trial.directory / "stats"
    wrong = {"num_rdt_buffers": 7, "gather_lookahead": 9, "num_consumers": 3, "stall_timeout_s": 0.0}
    found["wrong settings"] = refusal(lambda: trial.trainer(transport="local", **wrong))
    trainer = trial.trainer(
        transport="local", checksums="full", stats_dir=str(stats), on_identical="fail", record_chunks=True
    )
    good = [_right(trial.sync(trainer, seed)) for seed in "AB"]
    trial.client.init_weight_transfer_engine(trainer.init_payload(0))
    good.append(_right(trial.sync(trainer, "A")))

    trial.source.use(trial.checkpoints["B"])
    trainer.send_weights([0])
    good.append(generate(trial.llm) == trial.tokens["B"])
    found["live consumer 5"] = refusal(lambda: trainer.send_weights([5]))
    good.append(_right(trial.sync(trainer, "A")))

    found["identical"] = refusal(trainer.send_weights)
    good.append(_right(trial.sync(trainer, "A")))  # the retry

    first = next(iter(trial.source.weights))
    trial.source.weights[first] = None  # type: ignore[assignment]
    found["nothing"] = refusal(trainer.send_weights)
    trial.source.broken = True
    found["raising"] = refusal(trainer.send_weights)
    trial.source.broken = False
    good.append(_right(trial.sync(trainer, "B")))
    trainer.shutdown()
    found["good"] = good
    found["statistics"] = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in stats.glob("*.jsonl")
    }
    return found


def _right(sync: dict[str, Any]) -> bool:
    return sync["generation_equal"] and not sync["different"] and not sync["moved"]


def run(trial: Trial) -> dict[str, Any]:
    """All that applies to this model."""
    trial.start()
    result: dict[str, Any] = {}
    if trial.moe:
        result["faulty_reload"] = try_faulty_reload(trial)
    if trial.lifecycle:
        result["lifecycle"] = try_lifecycle(trial)
        result["operations"] = try_operations(trial)
    if trial.live:
        result["live"] = try_live_compile(trial)
    result["transports"] = try_transports(trial)
    result["recovery"] = try_recovery(trial)
    del trial.llm, trial.client
    gc.collect()
    return result


if __name__ == "__main__":
    trials = {name: Trial(name, Path(sys.argv[1]) / name) for name in sys.argv[2:]}
    print(json.dumps({name: run(trial) for name, trial in trials.items()}))
