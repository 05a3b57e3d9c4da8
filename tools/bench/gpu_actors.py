"""The processes of the GPU benchmark, as Ray actors: an engine that serves a model, and a trainer that feeds it.

All systems get the same actors; what differs is the backend of the engine and the class of the trainer.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

NAMESPACE = "bench"
PEER = "peer"
PROMPTS = ([1, 2, 3, 4, 5], [100, 200, 250, 17, 23, 42, 7], list(range(5, 37)))


class Engine:
    """A vLLM engine: its worker is this process, on the first GPU that it sees, or it has a process a GPU."""

    def __init__(self, checkpoint: str, backend: str, options: dict[str, Any]) -> None:
        """`backend`: of the weight transfer, the engine then starts from dummy weights; empty: serve `checkpoint`."""
        from vllm import LLM
        from vllm.config import WeightTransferConfig
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        from rdtexec.vllm.plugin import register

        register()
        transfer: dict[str, Any] = {}
        if backend:
            transfer = {"weight_transfer_config": WeightTransferConfig(backend=backend), "load_format": "dummy"}
        settings: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 4,
            "seed": 0,
            "dtype": "bfloat16",
            "kv_cache_memory_bytes": 256 << 20,
            "gpu_memory_utilization": 0.1,
            "enable_prefix_caching": False,
            "distributed_executor_backend": "mp" if "tensor_parallel_size" in options else UniProcExecutor,
        }
        self.llm = LLM(model=checkpoint, **(settings | transfer | options))

    def ready(self) -> str:
        import vllm

        return f"vLLM {vllm.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name()}"

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.llm.init_weight_transfer_engine(request)

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, request: Any) -> None:
        self.llm.update_weights(request)

    def finish_weight_update(self) -> None:
        self.llm.finish_weight_update()
        self.llm.collective_rpc(_synchronize)

    def report(self) -> dict[str, float]:
        """What rdtexec's first worker says of its last sync, in seconds."""
        return self.llm.collective_rpc(_report)[0]

    def peak_memory(self) -> int:
        """Bytes, of the worker that has most."""
        return max(self.llm.collective_rpc(_peak_memory))

    def answers(self) -> list[Any]:
        """Greedy tokens, and the logprobs of the best three at every step."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in PROMPTS], how, use_tqdm=False)
        return [
            (list(o.token_ids), [sorted((k, v.logprob) for k, v in d.items()) for d in o.logprobs or []])
            for o in (output.outputs[0] for output in outputs)
        ]

    def kernel_state(self) -> dict[str, str]:
        """A digest of everything the kernels read."""
        return _by_rank(self.llm.apply_model(_digests))

    def kernel_addresses(self) -> dict[str, int]:
        """Where the kernels' tensors lie: a sync must not move them."""
        return _by_rank(self.llm.apply_model(_addresses))


def _by_rank(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"{name} of rank {rank}": value for rank, of_rank in enumerate(found) for name, value in of_rank.items()}


@torch.no_grad()
def _digests(model: torch.nn.Module) -> dict[str, str]:
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    return {name: f"{t.dtype} {tuple(t.shape)} {_digest(t):016x}" for name, t in found.items() if not t.is_meta}


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in model.named_parameters(remove_duplicate=False)}


def _synchronize(_: Any) -> None:
    torch.cuda.synchronize()


def _peak_memory(_: Any) -> int:
    return torch.cuda.max_memory_allocated()


def _report(worker: Any) -> dict[str, float]:
    found = getattr(worker.weight_transfer_engine, "last_report", None)
    names = ("seconds", "wait_s", "transfer_s", "scatter_s", "complete_s")
    return {} if found is None else {name: getattr(found, name) for name in names}


def _digest(tensor: torch.Tensor) -> int:
    """64 bits of all bytes and their places, computed where they are: words times distinct odd numbers, summed."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    padded = torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
    total = 0
    for begin in range(0, padded.numel(), 1 << 26):
        part = padded[begin : begin + (1 << 26)]
        odd = torch.arange(begin, begin + part.numel(), device=part.device) * 0x2545F4914F6CDD1D * 2 + 1
        total += int((part * odd).sum())
    return total & (2**64 - 1)


def _source_class() -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class GpuSource(WeightSource):  # type: ignore[misc]
        """A trainer's weights on its GPU, in the order of a manifest. A training step changes them in place."""

        def __init__(self, manifest: Path, *, gathered: bool) -> None:
            self.weights = {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
                for name, dtype, shape in json.loads(manifest.read_text())
            }
            self._gathered = gathered

        def declared(self) -> list[Any]:
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.weights.items()]

        metadata = cached_property(declared) if hasattr(WeightSource, "iter_full") else declared  # vLLM 0.33, or 0.32

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.weights.items():
                yield name, tensor.clone() if self._gathered else tensor

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return self.iter_full()

    return GpuSource


class Trainer:
    """A trainer of one rank that feeds several systems from the same weights."""

    def __init__(self, manifest: str, engines: dict[str, Any], workers: int, *, gathered: bool) -> None:
        """`engines` by system, `peer` or one of rdtexec's transports; each has `workers`."""
        import vllm.distributed.weight_transfer.sharded_rdt_trainer  # noqa: F401  an init must not pay the imports

        import rdtexec.vllm.trainer  # noqa: F401

        self._engines, self._workers = engines, workers
        self._source = _source_class()(Path(manifest), gathered=gathered)
        self._trainers: dict[str, Any] = {}
        self._clients: dict[str, Any] = {}

    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._source.weights.values())

    @torch.no_grad()
    def train(self, seed: int) -> None:
        """Weights that depend on the seed alone."""
        rng = torch.Generator("cuda").manual_seed(seed)
        for name, tensor in self._source.weights.items():
            spread = 0.2 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
            tensor.normal_(generator=rng).mul_(spread)
            if "norm" in name:
                tensor.add_(1)
        torch.cuda.synchronize()

    def save(self, directory: str, seed: int) -> None:
        """The checkpoint of a seed."""
        from safetensors.torch import save_file

        self.train(seed)
        save_file(self._source.weights, f"{directory}/model.safetensors")

    def init(self, system: str, plan: str) -> dict[str, float]:
        """Seconds from the call of `trainer_init` until the workers are ready, and the worker's part of it."""
        client = self._clients[system] = _timed_client(self._engines[system])
        if system == PEER:
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo

            started = time.perf_counter()
            info = ShardedRDTTrainerInitInfo(
                rank=0, num_consumers=self._workers, trainer_actor_namespace=NAMESPACE, stall_timeout_s=60
            )
            trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._source)
        else:
            from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo

            started = time.perf_counter()
            ours = RdtExecTrainerInitInfo(rank=0, plan=plan, transport=system, stall_timeout_s=60)
            trainer = RdtExecTrainer.trainer_init(ours, client=client, source=self._source)
        self._trainers[system] = trainer
        return {"wall": time.perf_counter() - started} | client.seconds

    def sync(self, system: str) -> dict[str, float]:
        """One sync: its seconds, those of each call to the inference side, and of our own trainer's parts."""
        client, trainer = self._clients[system], self._trainers[system]
        client.seconds.clear()
        torch.cuda.synchronize()
        started = time.perf_counter()
        trainer.send_weights()
        found = {"wall": time.perf_counter() - started} | client.seconds
        report = getattr(trainer, "last_report", None)
        names = ("gather_s", "publish_s", "serve_s", "wait_s")
        return found | ({} if report is None else {f"trainer_{name}": getattr(report, name) for name in names})

    def plain_copy(self, target: int) -> float:
        """Seconds to copy as many bytes in one piece to GPU `target`, median of five."""
        source = torch.empty(self.nbytes(), dtype=torch.uint8, device="cuda")
        dest = torch.empty_like(source, device=f"cuda:{target}")
        times = []
        for _ in range(6):
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(target)
            started = time.perf_counter()
            dest.copy_(source)
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(target)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    def shutdown(self) -> None:
        for trainer in self._trainers.values():
            trainer.shutdown()


def _timed_client(engine: Any) -> Any:
    from vllm.distributed.weight_transfer import RayVLLMWeightSyncClient

    class TimedClient(RayVLLMWeightSyncClient):  # type: ignore[misc]
        """vLLM's Ray client; `seconds` holds how long each of its calls took since it was last emptied."""

        def __init__(self, handle: Any) -> None:
            super().__init__(handle)
            self.seconds: dict[str, float] = {}

        def _timed(self, name: str, call: Any, *args: Any) -> None:
            started = time.perf_counter()
            call(*args)
            self.seconds[name] = time.perf_counter() - started

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            self._timed("worker_init", super().init_weight_transfer_engine, init_info)

        def start_weight_update(self) -> None:
            self._timed("start", super().start_weight_update)

        def update_weights(self, update_info: Any) -> None:
            self._timed("update", super().update_weights, update_info)

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            self._timed("finish", super().finish_weight_update, weight_version)

    return TimedClient(engine)
