"""A trainer of two pipeline stages that feeds a running vLLM server: each rank holds half of the layers.

    torchrun --nproc-per-node 2 docs/examples/pipeline_trainer.py MODEL_DIR http://localhost:8000 [compile options]

MODEL_DIR is the checkpoint directory that the server serves. The plan is compiled at init; options such as `--tp 2`
describe the server. The example syncs twice: once with every weight halved, once with the checkpoint's own weights
again.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo
from rdtplan.inputs.manifests import from_checkpoint
from rdtplan.passes.group_names import group_key


class StageSource(WeightSource):
    """One pipeline stage: yields its own weights, and None for the rest."""

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self.entries = from_checkpoint(directory)
        self.files = sorted(directory.glob("*.safetensors"))
        self.scale = 1.0
        layers = 1 + max(key[1] for e in self.entries if (key := group_key(e.name)))
        stage_of = {e.name: self._stage(e.name, layers, ranks) for e in self.entries}
        self.mine = {name for name, stage in stage_of.items() if stage == rank}

    @staticmethod
    def _stage(name: str, layers: int, ranks: int) -> int:
        key = group_key(name)
        if key is None:
            return 0 if "embed" in name else ranks - 1
        return key[1] * ranks // layers

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(e.name, getattr(torch, e.dtype), e.shape) for e in self.entries]

    def held_names(self) -> Collection[str]:
        return self.mine

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        where: dict[str, Path] = {}
        for file in self.files:
            with safe_open(file, "pt") as opened:
                where |= dict.fromkeys(opened.keys(), file)
        for e in self.entries:
            if e.name not in self.mine:
                yield e.name, None  # type: ignore[misc]
                continue
            with safe_open(where[e.name], "pt") as opened:
                yield e.name, opened.get_tensor(e.name) * self.scale


def main() -> None:
    directory, url, *options = sys.argv[1:]
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    source = StageSource(Path(directory), rank, ranks)
    info = RdtExecTrainerInitInfo(
        rank=rank, model=directory, compile_options=("--stages-in-flight", "2", *options), repair_reload=True
    )
    trainer = RdtExecTrainer.trainer_init(info, client=HTTPVLLMWeightSyncClient(url), source=source)
    for source.scale in (0.5, 1.0):
        trainer.send_weights()
        report = trainer.last_report
        assert report is not None
        print(f"rank {rank}: sync {report.sync} served {report.pulls} chunks in {report.seconds:.3f} s", flush=True)
    dist.barrier()
    trainer.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
