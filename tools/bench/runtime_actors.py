"""The processes of the runtime benchmark, as Ray actors: an engine that serves a model, and a trainer that feeds it.

Both systems get the same actors; what differs is the backend of the engine and the class of the trainer.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import RayVLLMWeightSyncClient
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

NAMESPACE = "bench"
PEER = "peer"
PROMPTS = ([1, 2, 3, 4, 5], [100, 200, 250, 17, 23, 42, 7])


class Engine:
    """A vLLM engine whose worker is this process."""

    def __init__(self, checkpoint: str, backend: str) -> None:
        """`backend`: of the weight transfer; empty for an engine that only serves `checkpoint`."""
        from vllm import LLM
        from vllm.config import WeightTransferConfig
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        from rdtexec.vllm.plugin import register

        register()
        if backend == "sharded_rdt":
            from peer_on_cpu import patch_worker

            patch_worker()
        transfer = {"weight_transfer_config": WeightTransferConfig(backend=backend)} if backend else {}
        self.llm = LLM(
            model=checkpoint,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=4,
            seed=0,
            dtype="bfloat16",
            kv_cache_memory_bytes=64 << 20,
            enable_prefix_caching=False,
            distributed_executor_backend=UniProcExecutor,
            **transfer,
        )

    def pid(self) -> int:
        return os.getpid()

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.llm.init_weight_transfer_engine(request)

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, request: Any) -> None:
        self.llm.update_weights(request)

    def finish_weight_update(self) -> None:
        self.llm.finish_weight_update()

    def answers(self) -> list[Any]:
        """Greedy tokens, and the logprobs of the best three at every step."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in PROMPTS], how, use_tqdm=False)
        return [
            (list(o.token_ids), [sorted((k, v.logprob) for k, v in d.items()) for d in o.logprobs or []])
            for o in (output.outputs[0] for output in outputs)
        ]

    @torch.no_grad()
    def kernel_state(self) -> dict[str, str]:
        """A digest of everything the kernels read: parameters, buffers, and the weights packed in linear layers.

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
            return {name: f"{t.dtype} {tuple(t.shape)} {_sha256(t)}" for name, t in found.items()}

        return self.llm.apply_model(digest)[0]


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


class CheckpointSource(WeightSource):
    """A trainer's weights, in the order of a manifest. A training step changes them in place."""

    def __init__(self, manifest: Path, *, gathered: bool) -> None:
        """`gathered`: yield a copy of every tensor in memory of its own, as an all-gather would."""
        self._weights = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, dtype, shape in json.loads(manifest.read_text())
        }
        self._gathered = gathered

    def train(self, checkpoint: Path) -> None:
        """Take the values of a checkpoint."""
        new = load_file(str(checkpoint / "model.safetensors"))
        for name, tensor in self._weights.items():
            tensor.copy_(new[name])

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self._weights.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights.items():
            yield name, tensor.clone() if self._gathered else tensor


class TimedClient(RayVLLMWeightSyncClient):
    """vLLM's Ray client; `seconds` holds how long each of its calls took since it was last emptied."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self.seconds: dict[str, float] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        with _Clock(self.seconds, "worker_init"):
            super().init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        with _Clock(self.seconds, "start"):
            super().start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        with _Clock(self.seconds, "update"):
            super().update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        with _Clock(self.seconds, "finish"):
            super().finish_weight_update(weight_version)


class _Clock:
    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] = time.perf_counter() - self._started


class Trainer:
    """A trainer of one rank."""

    def __init__(self, system: str, engine: Any, manifest: str, *, gathered: bool) -> None:
        """`system`: `peer`, or one of rdtexec's transports."""
        self._system = system
        self._client = TimedClient(engine)
        self._source = CheckpointSource(Path(manifest), gathered=gathered)
        if system == PEER:
            from peer_on_cpu import patch_trainer

            patch_trainer()
        else:
            import rdtexec.vllm.trainer  # noqa: F401  an init must not pay the import
        self._trainer: Any = None

    def pid(self) -> int:
        return os.getpid()

    def producer_pid(self) -> int | None:
        """The process that serves, where it is not this one."""
        return self._trainer.producer_pid() if self._system == PEER else None

    def train(self, checkpoint: str) -> None:
        self._source.train(Path(checkpoint))

    def init(self, plan: str) -> dict[str, float]:
        """Seconds from the call of `trainer_init` until the workers are ready, and the worker's part of it.

        An empty `plan` compiles one then.
        """
        self._client.seconds.clear()
        started = time.perf_counter()
        if self._system == PEER:
            from peer_on_cpu import CpuTrainer
            from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo

            peer_info = ShardedRDTTrainerInitInfo(rank=0, num_consumers=1, trainer_actor_namespace=NAMESPACE)
            self._trainer = CpuTrainer.trainer_init(peer_info, client=self._client, source=self._source)
        else:
            from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo

            info = RdtExecTrainerInitInfo(rank=0, plan=plan, transport=self._system)
            self._trainer = RdtExecTrainer.trainer_init(info, client=self._client, source=self._source)
        return {"wall": time.perf_counter() - started} | self._client.seconds

    def sync(self) -> dict[str, float]:
        """One sync: its seconds, and those of each call to the inference side."""
        self._client.seconds.clear()
        started = time.perf_counter()
        self._trainer.send_weights()
        return {"wall": time.perf_counter() - started} | self._client.seconds

    def shutdown(self) -> None:
        self._trainer.shutdown()
