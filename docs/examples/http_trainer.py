"""A trainer of one rank that sends checkpoints to a running vLLM server, one sync each.

    python docs/examples/http_trainer.py PLAN URL CHECKPOINT [CHECKPOINT ...] [--transport nixl] [--repair-reload]

A real trainer hands over its own weights: anything with the two methods of `CheckpointSource`, or vLLM's
`ModuleSource(model)` for a plain or FSDP2 module.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import requests
import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo


class CheckpointSource(WeightSource):
    """The weights of one checkpoint directory; `load` stands for a training step."""

    def __init__(self, checkpoint: Path) -> None:
        self.load(checkpoint)

    def load(self, checkpoint: Path) -> None:
        """Change to the weights of another checkpoint of the same model."""
        self.weights: dict[str, torch.Tensor] = {}
        for file in sorted(checkpoint.glob("*.safetensors")):
            self.weights |= load_file(file)

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes and shapes: held to the plan before anything moves."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A fresh pass for each sync."""
        yield from self.weights.items()


def post(url: str, route: str, **params: str) -> None:
    requests.post(f"{url}/{route}", params=params, timeout=300).raise_for_status()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan")
    parser.add_argument("url")
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--transport", default="local", choices=["local", "nixl"])
    parser.add_argument("--repair-reload", action="store_true")
    args = parser.parse_args()

    source = CheckpointSource(args.checkpoints[0])
    info = RdtExecTrainerInitInfo(rank=0, plan=args.plan, transport=args.transport, repair_reload=args.repair_reload)
    trainer = RdtExecTrainer.trainer_init(info, client=HTTPVLLMWeightSyncClient(args.url), source=source)
    try:
        for checkpoint in args.checkpoints:
            source.load(checkpoint)
            post(args.url, "pause", mode="wait")  # running requests end first, new ones wait
            trainer.send_weights()
            post(args.url, "resume")
            report = trainer.last_report
            assert report is not None
            print(f"{checkpoint}: {report.pulls} chunks in {report.seconds:.3f} s")
    finally:
        trainer.shutdown()


if __name__ == "__main__":
    main()
