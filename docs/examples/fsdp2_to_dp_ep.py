"""An FSDP2 trainer of two ranks feeds a vLLM server with data and expert parallelism, on one machine without a GPU.

    python docs/examples/fsdp2_to_dp_ep.py

The trainer takes real optimizer steps on a tiny Qwen3-MoE in float32; the server holds it in bfloat16, half of the
experts in each of two engine processes. Checked at the end, with exit code 1 if one does not hold: the sync moved the
answers; they are, to the last logprob, those of a fresh server that loads the trained checkpoint from disk; a second
sync without training changes nothing.

`train` is the part to look at. The rest starts processes and compares.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import tiny

RANKS = ENGINES = 2
STEPS = 3
LAYOUT = ("--data-parallel-size", str(ENGINES), "--enable-expert-parallel")


def train(checkpoint: Path, url: str, trained: Path) -> None:
    """One trainer rank, under torchrun."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    from rdtexec.sources import ModuleSource, split_experts
    from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # transformers keeps the experts of a layer fused, checkpoints apart; the optimizer has float32, the server bfloat16
    source = ModuleSource(model, split=split_experts, dtype=torch.bfloat16)
    info = RdtExecTrainerInitInfo(rank=rank, repair_reload=True)
    trainer = RdtExecTrainer.trainer_init(info, client=HTTPVLLMWeightSyncClient(url), source=source)
    found = {"before": tiny.answers(url, ENGINES) if rank == 0 else []}

    tokens = torch.randint(0, 512, (4, 32), generator=torch.Generator().manual_seed(rank))
    for step in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    for sync in ("after the sync", "after a sync without training"):
        if rank == 0:
            tiny.post(url, "pause", mode="wait")  # running requests end first, new ones wait
        trainer.send_weights()  # every rank: gathering a layer is a collective
        if rank == 0:
            tiny.post(url, "resume")
            report = trainer.last_report
            assert report is not None
            print(f"sync {report.sync}: {report.pulls} chunks in {report.seconds:.3f} s", flush=True)
            found[sync] = tiny.answers(url, ENGINES)
    save_trained(model, checkpoint, trained)
    if rank == 0:
        (trained / "answers.json").write_text(json.dumps(found))
    dist.barrier()
    trainer.shutdown()
    dist.destroy_process_group()


def save_trained(model: Any, checkpoint: Path, trained: Path) -> None:
    """The trained model as a checkpoint, by torch and transformers alone."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if torch.distributed.get_rank() == 0:
        whole: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        whole.load_state_dict(state)
        whole.to(torch.bfloat16).save_pretrained(trained)
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(trained)


def main() -> None:
    if len(sys.argv) == 4:  # as torchrun starts it
        train(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
        return
    with tempfile.TemporaryDirectory(prefix="rdtexec-example-") as scratch:
        directory = Path(scratch)
        environment = tiny.cpu_testbed(directory / "testbed")
        checkpoint = tiny.write_checkpoint(directory / "before", seed=1, experts=8)
        with tiny.server(checkpoint, *LAYOUT, environment=environment) as running:
            tiny.torchrun(__file__, RANKS, str(checkpoint), running.url, str(directory / "trained"))
        found = json.loads((directory / "trained/answers.json").read_text())
        with tiny.server(directory / "trained", *LAYOUT, environment=environment) as fresh:
            expected = tiny.answers(fresh.url, ENGINES)
    after = found["after the sync"]
    for k in range(len(after)):
        tiny.check(f"answer {k} changed: its logprobs differ", after[k][1] != found["before"][k][1])
    for k in range(0, len(after), ENGINES):
        tiny.check("both engines answer alike", all(other[0] == after[k][0] for other in after[k : k + ENGINES]))
    tiny.check("answers are those of a fresh server on the trained checkpoint", after == expected)
    tiny.check("a sync without training changed nothing", found["after a sync without training"] == after)


if __name__ == "__main__":
    main()
