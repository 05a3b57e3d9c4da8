"""A running vLLM server is given another checkpoint from disk, without a restart.

    python docs/examples/reload_from_checkpoint.py

The "trainer" is one process that reads a sharded safetensors directory, one layer in memory at a time. The plan is
compiled beforehand, from the headers of the first checkpoint. Checked: after the sync the server answers, to the last
logprob, as a fresh server on that checkpoint does, and after the way back as it did at first; a checkpoint of another
model is refused by name before anything moves.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import tiny
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

from rdtexec.sources import CheckpointSource
from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo
from rdtplan.errors import PlanMismatch


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="rdtexec-example-") as scratch:
        directory = Path(scratch)
        first = tiny.write_checkpoint(directory / "first", seed=1, max_shard_size="200KB")
        second = tiny.write_checkpoint(directory / "second", seed=2, max_shard_size="200KB")
        other = tiny.write_checkpoint(directory / "other", seed=3, experts=8)
        with tiny.server(second) as fresh:
            expected = tiny.answers(fresh.url)

        plan = directory / "fleet.plan"
        command = [sys.executable, "-m", "rdtplan.cli", "compile", str(first), "--manifest", str(first)]
        subprocess.run([*command, "-o", str(plan)], check=True)

        with tiny.server(first) as running:
            before = tiny.answers(running.url)
            source = CheckpointSource(first)
            info = RdtExecTrainerInitInfo(rank=0, plan=str(plan))
            client = HTTPVLLMWeightSyncClient(running.url)
            trainer = RdtExecTrainer.trainer_init(info, client=client, source=source)
            try:
                found = {}
                for checkpoint in (second, first):
                    source.use(checkpoint)
                    tiny.post(running.url, "pause", mode="wait")
                    trainer.send_weights()
                    tiny.post(running.url, "resume")
                    report = trainer.last_report
                    assert report is not None
                    print(f"{checkpoint.name}: {report.pulls} chunks in {report.seconds:.3f} s", flush=True)
                    found[checkpoint.name] = tiny.answers(running.url)
                refused = ""
                try:
                    source.use(other)
                except PlanMismatch as error:
                    refused = str(error)
                print(refused, flush=True)
            finally:
                trainer.shutdown()
        files = len(list(second.glob("*.safetensors")))
        tiny.check(f"the second checkpoint has several files: {files}", files > 1)
        tiny.check("the two checkpoints answer differently", expected != before)
        tiny.check("after the sync: a fresh server's answers", found["second"] == expected)
        tiny.check("after the way back: the answers from before", found["first"] == before)
        tiny.check("a checkpoint of another model is refused", "RDT503" in refused)


if __name__ == "__main__":
    main()
