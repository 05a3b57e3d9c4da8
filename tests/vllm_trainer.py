"""One rank of a trainer that feeds real vLLM servers, in one of several layouts. Rank 0 checks what the servers answer.

usage: python tests/vllm_trainer.py ORDER.json RANK

A script and not a test, because every rank is a process of its own and vLLM keeps state of the process. `ORDER.json` is
an `Order`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from attrs import frozen
from safetensors.torch import load_file

LAYERS, EXPERTS = ".layers.", ".experts."


@frozen
class Order:
    """What a trainer does: for each transport, connect and send checkpoints in turn."""

    layout: str
    """`whole`, `fsdp`, `shards` (FSDP that gathers nothing), `stages` or `experts`."""
    world: int
    store: str
    """File through which the ranks find each other."""
    urls: tuple[str, ...]
    """One server a replica."""
    transports: tuple[str, ...]
    sequence: str
    """Names of checkpoints, one a sync."""
    checkpoints: dict[str, str]
    expected: dict[str, Any]
    """What a fresh server on each checkpoint answers."""
    repair_reload: bool
    ray: str
    """Address of a Ray cluster, for `ray_rdt`."""


class Holder(torch.nn.Module):
    """A node of the module tree."""


def module_of(names: list[str], weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module tree with a parameter for each of `names`."""
    root = Holder()
    for name in names:
        *path, leaf = name.split(".")
        module: torch.nn.Module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, Holder())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(leaf, torch.nn.Parameter(weights[name].clone(), requires_grad=False))
    return root


def names_of_rank(layout: str, names: list[str], rank: int, world: int) -> list[str]:
    """The names that a rank holds: all of them, a run of layers, or some experts and everything else."""
    if layout == "stages":
        count = 1 + max(int(n.split(LAYERS)[1].split(".")[0]) for n in names if LAYERS in n)
        return [n for n in names if stage_of(n, count, world) == rank]
    if layout == "experts":
        return [n for n in names if EXPERTS not in n or int(n.split(EXPERTS)[1].split(".")[0]) % world == rank]
    return names


def stage_of(name: str, layers: int, stages: int) -> int:
    """Embeddings are in the first stage, the head in the last."""
    if LAYERS in name:
        return int(name.split(LAYERS)[1].split(".")[0]) * stages // layers
    return 0 if "embed" in name else stages - 1


def train(module: torch.nn.Module, checkpoint: str) -> None:
    """Give the module the weights of a checkpoint, as an optimizer step would."""
    from torch.distributed.tensor import DTensor

    weights = load_file(f"{checkpoint}/model.safetensors")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            pieces = weights[name].chunk(dist.get_world_size())
            if dist.get_rank() < len(pieces):
                parameter.to_local().copy_(pieces[dist.get_rank()])
        else:
            parameter.copy_(weights[name])


def run(order: Order, rank: int) -> Iterator[str]:
    """Every sync, with what is wrong about the answers after it ('' when nothing is)."""
    from torch.distributed.fsdp import fully_shard
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    from rdtexec.sources import LocalModuleSource, ModuleSource, ShardSource
    from rdtexec.vllm.clients import ReplicaClient
    from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo
    from tests.vllm_server import completions, post

    weights = load_file(f"{order.checkpoints['A']}/model.safetensors")
    module = module_of(names_of_rank(order.layout, list(weights), rank, order.world), weights)
    if order.layout in ("fsdp", "shards"):
        fully_shard(module)
    make = {"shards": ShardSource, "stages": LocalModuleSource, "experts": LocalModuleSource}
    source: Any = make.get(order.layout, ModuleSource)(module)
    for transport in order.transports:
        if transport == "ray_rdt":
            import ray

            ray.init(address=order.ray, namespace="trainer", log_to_driver=False)
        client = ReplicaClient([HTTPVLLMWeightSyncClient(url, timeout=300) for url in order.urls])
        info = RdtExecTrainerInitInfo(
            rank=rank,
            transport=transport,
            repair_reload=order.repair_reload,
            checksums="full",
            stall_timeout_s=300,
        )
        trainer = RdtExecTrainer.trainer_init(info, client=client, source=source)
        for seed in order.sequence:
            train(module, order.checkpoints[seed])
            for url in order.urls if rank == 0 else ():
                post(url, "pause", mode="wait")
            trainer.send_weights()
            dist.barrier()
            wrong = []
            for url in order.urls if rank == 0 else ():
                post(url, "resume")
                wrong += [] if completions(url) == order.expected[seed] else [url]
            yield f"{order.layout}, {transport}, {seed}: {wrong}" if wrong else ""
        trainer.shutdown()
        if transport == "ray_rdt":
            ray.shutdown()


def main() -> None:
    order, rank = Order(**json.loads(Path(sys.argv[1]).read_text())), int(sys.argv[2])
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", init_method=f"file://{order.store}", rank=rank, world_size=order.world)
    results = list(run(order, rank))
    wrong = [r for r in results if r]
    if wrong or len(results) != len(order.transports) * len(order.sequence):
        raise SystemExit(f"rank {rank}: {wrong or results}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
