"""Under Ray: vLLM lives in one actor, the trainer in another, and vLLM's own Ray client carries the control calls.

    python docs/examples/ray_actors.py [local | nixl]

The engine actor is a plain class around `vllm.LLM` with the four methods that `RayVLLMWeightSyncClient` calls; the
trainer actor takes real optimizer steps on a tiny Llama. The weights do not go through Ray but by the transport named,
`local` unless told otherwise (`nixl` also works across nodes: give `RdtExecTrainerInitInfo` an `address=(host, port)`).
Checked: the sync moved the answers, they are those of a fresh engine on the trained checkpoint, and a second sync
without training changes nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import tiny

STEPS = 3


class Engine:
    """One vLLM engine in this actor's process."""

    def __init__(self, checkpoint: str) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        self.llm = LLM(
            model=checkpoint,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=4,
            kv_cache_memory_bytes=64 << 20,
            enable_prefix_caching=False,
            distributed_executor_backend=UniProcExecutor,  # inside an actor vLLM would choose Ray's executor
            weight_transfer_config=WeightTransferConfig(backend="rdtexec"),
        )

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.llm.init_weight_transfer_engine(request)

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, request: Any) -> None:
        self.llm.update_weights(request)

    def finish_weight_update(self) -> None:
        self.llm.finish_weight_update()

    def answers(self) -> list[Any]:
        """Greedy tokens, with the best three logprobs at every step."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in tiny.PROMPTS], how, use_tqdm=False)
        found: list[Any] = []
        for output in outputs:
            steps: Any = output.outputs[0].logprobs
            logprobs = [sorted((token, entry.logprob) for token, entry in step.items()) for step in steps]
            found.append((list(output.outputs[0].token_ids), logprobs))
        return found


class Trainer:
    """One trainer rank in this actor's process."""

    def __init__(self, checkpoint: str, engine: Any, transport: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from vllm.distributed.weight_transfer import RayVLLMWeightSyncClient

        from rdtexec.sources import ModuleSource
        from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo

        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        source = ModuleSource(self.model, dtype=torch.bfloat16)
        info = RdtExecTrainerInitInfo(rank=0, transport=transport)
        client = RayVLLMWeightSyncClient(engine)
        self.trainer = RdtExecTrainer.trainer_init(info, client=client, source=source)

    def step(self) -> float:
        import torch

        tokens = torch.randint(0, 512, (4, 32), generator=torch.Generator().manual_seed(0))
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def sync(self) -> str:
        self.trainer.send_weights()
        report = self.trainer.last_report
        assert report is not None
        return f"sync {report.sync}: {report.pulls} chunks in {report.seconds:.3f} s"

    def save(self, directory: str) -> None:
        """The trained weights as the server should have them, by transformers alone."""
        import copy

        import torch

        copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(directory)

    def close(self) -> None:
        self.trainer.shutdown()


def main() -> None:
    transport = sys.argv[1] if len(sys.argv) > 1 else "local"
    with tempfile.TemporaryDirectory(prefix="rdtexec-example-") as scratch:
        checkpoint = str(tiny.write_checkpoint(Path(scratch) / "before", seed=1))
        trained = str(Path(scratch) / "trained")
        # pretended CPUs: what Ray counts need not be there; an address of its own, whatever else runs here
        ray.init(address="local", num_cpus=4, num_gpus=0, include_dashboard=False, object_store_memory=100 << 20)
        try:
            quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
            in_process = {"env_vars": quiet | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
            engines: Any = ray.remote(num_cpus=1)(Engine).options(runtime_env=in_process)
            engine = engines.remote(checkpoint)
            before = ray.get(engine.answers.remote())
            trainer: Any = ray.remote(num_cpus=1)(Trainer).remote(checkpoint, engine, transport)
            for step in range(STEPS):
                print(f"step {step}: loss {ray.get(trainer.step.remote()):.3f}", flush=True)
            print(ray.get(trainer.sync.remote()), flush=True)
            after = ray.get(engine.answers.remote())
            print(ray.get(trainer.sync.remote()), flush=True)
            again = ray.get(engine.answers.remote())
            ray.get(trainer.save.remote(trained))
            ray.get(trainer.close.remote())
            expected = ray.get(engines.remote(trained).answers.remote())
        finally:
            ray.shutdown()
        tiny.check("the sync moved the answers", after != before)
        tiny.check("answers are those of a fresh engine on the trained checkpoint", after == expected)
        tiny.check("a sync without training changed nothing", again == after)


if __name__ == "__main__":
    main()
