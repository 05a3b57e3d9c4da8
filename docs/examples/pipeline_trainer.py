"""A trainer of two pipeline stages feeds a running vLLM server: each rank has half of the layers and serves them.

    python docs/examples/pipeline_trainer.py                                       # on its own, checks itself
    torchrun --nproc-per-node 2 docs/examples/pipeline_trainer.py MODEL_DIR http://localhost:8000

In the second form MODEL_DIR is the checkpoint directory (of a Llama) that your server serves. Each sync sends what the
stages hold: first every weight halved, then the checkpoint's own again. Checked in the first form: the halved weights
answer as a fresh server on a halved checkpoint does, and the second sync brings the first answers back.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import tiny

RANKS = 2
FACTORS = (0.5, 2.0)
"""What each sync multiplies all weights with; powers of two, so that nothing is rounded."""


def load_stage(checkpoint: str, stage: int, stages: int) -> tuple[Any, int]:
    """(one stage of the model, the number of its first layer). The first has the embeddings, the last norm and head."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    layers = len(model.model.layers)
    begin, end = stage * layers // stages, (stage + 1) * layers // stages
    model.model.layers = model.model.layers[begin:end]
    if stage > 0:
        model.model.embed_tokens = None
    if stage < stages - 1:
        model.model.norm = model.lm_head = None
    return model, begin


def train(checkpoint: str, url: str) -> list[Any]:
    """One trainer rank, under torchrun. Returns rank 0's answers after each sync."""
    import torch
    import torch.distributed as dist
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    from rdtexec.sources import LocalModuleSource
    from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage, begin = load_stage(checkpoint, rank, ranks)

    def rename(name: str) -> str:
        """Layers count from 0 on every stage; checkpoints count through."""
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            parts[2] = str(int(parts[2]) + begin)
        return ".".join(parts)

    source = LocalModuleSource(stage, rename=rename)
    # independent streams: the workers pull from both stages at once
    info = RdtExecTrainerInitInfo(rank=rank, stages_in_flight=ranks)
    trainer = RdtExecTrainer.trainer_init(info, client=HTTPVLLMWeightSyncClient(url), source=source)
    found = []
    for factor in FACTORS:
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.mul_(factor)
        trainer.send_weights()
        report = trainer.last_report
        assert report is not None
        print(f"rank {rank}: sync {report.sync} served {report.pulls} chunks in {report.seconds:.3f} s", flush=True)
        if rank == 0:
            found.append(tiny.answers(url))
        dist.barrier()
    trainer.shutdown()
    dist.destroy_process_group()
    return found


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="rdtexec-example-") as scratch:
        directory = Path(scratch)
        checkpoint = tiny.write_checkpoint(directory / "checkpoint", seed=1)
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(FACTORS[0])
        model.save_pretrained(directory / "halved")
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(directory / "halved")
        with tiny.server(directory / "halved") as fresh:
            expected = tiny.answers(fresh.url)
        with tiny.server(checkpoint) as running:
            before = tiny.answers(running.url)
            written = directory / "answers.json"
            tiny.torchrun(__file__, RANKS, str(checkpoint), running.url, "--answers", str(written))
        halved, again = json.loads(written.read_text())
        tiny.check("halved weights answer differently", expected != before)
        tiny.check("after the first sync: a fresh server's answers", halved == expected)
        tiny.check("after the second sync: the answers from before", again == before)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    output = None
    if "--answers" in arguments:
        at = arguments.index("--answers")
        output = Path(arguments[at + 1])
        del arguments[at : at + 2]
    if not arguments:
        main()
    else:
        answers = train(*arguments)
        if output and answers:
            output.write_text(json.dumps(answers))
