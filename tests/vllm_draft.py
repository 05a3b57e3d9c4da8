"""Speculative decoding through vLLM in this process: one sync writes the model and its draft model. Prints a JSON line.

usage: python tests/vllm_draft.py DIRECTORY METHOD

A script for the reasons that tests/vllm_sync.py has.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import vllm_sync
from safetensors.torch import load_file, save_file
from vllm_sync import CheckpointSource, InProcessClient, compile_plan, engine, generate, kernel_state, refusal

from tests.drafts import write_draft, write_target


class Client(InProcessClient):
    """A client that can show the draft model."""

    def start_draft_weight_update(self) -> None:
        self.llm.start_draft_weight_update()


def draft_state(worker: Any) -> dict[str, str]:
    """A digest of every tensor of the draft model; linear layers packed away are unpacked."""
    import torch

    model = worker.get_draft_model()
    found: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        inputs = getattr(module, "input_size_per_partition", getattr(module, "input_size", None))
        if inputs and hasattr(module, "cpu_linear"):
            found[f"{name}.packed"] = module.cpu_linear(
                torch.eye(inputs, dtype=module.weight.dtype), module.weight, None
            )
    return {name: hashlib.sha256(vllm_sync._bytes(t)).hexdigest() for name, t in found.items()}


def main(directory: Path, method: str) -> dict[str, Any]:
    checkpoints = {seed: write_target(method, directory / seed, ord(seed)) for seed in "AC"}
    drafts = {seed: write_draft(method, directory / f"draft-{seed}", ord(seed)) for seed in "AC"}
    speculative = {
        seed: {"method": method, "num_speculative_tokens": 1} | ({"model": str(draft)} if draft else {})
        for seed, draft in drafts.items()
    }
    weights = load_file(str(checkpoints["A"] / "model.safetensors"))
    if drafts["A"]:
        own = load_file(str(drafts["A"] / "model.safetensors"))
        weights |= {f"draft.{name}": tensor for name, tensor in own.items()}
    (directory / "trainer").mkdir()
    save_file(weights, str(directory / "trainer/model.safetensors"))
    config = json.loads((checkpoints["A"] / "config.json").read_text())
    (directory / "trainer/config.json").write_text(json.dumps(config))
    plain = directory / "plain.plan"
    both = directory / "both.plan"
    compile_plan(checkpoints["A"], plain)
    from rdtplan.cli import main as rdtplan

    options = ["--manifest", str(directory / "trainer"), "--jobs", "1", "-o", str(both)]
    options += ["--speculative-config", json.dumps(speculative["A"])]
    assert not rdtplan(["compile", str(checkpoints["A"]), *options], standalone_mode=False)

    from vllm.config import WeightTransferConfig

    fresh = engine(checkpoints["A"], speculative_config=speculative["A"])
    wanted = (generate(fresh), kernel_state(fresh), fresh.collective_rpc(draft_state)[0])
    del fresh
    gc.collect()
    llm = engine(
        checkpoints["C"],
        speculative_config=speculative["C"],
        weight_transfer_config=WeightTransferConfig(backend="rdtexec"),
    )
    from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo

    def trainer(plan: Path | None, source: Path, client: Any, **extra: Any) -> Any:
        client.extra = extra
        info = RdtExecTrainerInitInfo(rank=0, plan=str(plan or ""), transport="local", repair_reload=True)
        return RdtExecTrainer.trainer_init(info, client=client, source=CheckpointSource(source))

    found: dict[str, Any] = {"before": llm.collective_rpc(draft_state)[0] == wanted[2]}
    found["left out"] = refusal(lambda: trainer(plain, checkpoints["A"], Client(llm)))
    found["compiled at init"] = refusal(lambda: trainer(None, checkpoints["A"], Client(llm)))
    found["client cannot show"] = refusal(lambda: trainer(both, directory / "trainer", InProcessClient(llm)))
    found["syncs"] = []
    with_both = trainer(both, directory / "trainer", Client(llm))
    for _ in range(2):
        with_both.send_weights()
        llm.reset_prefix_cache()
        found["syncs"].append(
            {
                "generation_equal": generate(llm) == wanted[0],
                "model": _differing(kernel_state(llm), wanted[1]),
                "draft": _differing(llm.collective_rpc(draft_state)[0], wanted[2]),
            }
        )
    found["compared"] = len(wanted[2])
    with_both.shutdown()
    kept = trainer(plain, checkpoints["A"], Client(llm), keep_draft_model=True)
    kept.send_weights()
    found["left out on purpose"] = generate(llm) == wanted[0]
    kept.shutdown()
    return found


def _differing(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return sorted(name for name in a | b if a.get(name) != b.get(name))


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
