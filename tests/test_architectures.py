"""Architectures whose loaders do more than copy slices, against stock vLLM: one of each kind; `tools/sweep` has all.

Every model runs in a forked process, as in the sweep: what the CPU build lacks is stood in for there, and only there.
They are forked from this file run as a script: one that has computed with torch must not be forked.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import oracle
import pytest

CASES: dict[str, tuple[str, int]] = {
    "MambaForCausalLM": ("tp2", 1),
    "MiniMaxM2ForCausalLM": ("tp2-ep", 0),  # loaders that are a `functools.partial`
    "Mamba2ForCausalLM@g1": ("tp2", 1),
    "JambaForCausalLM": ("tp2", 1),
    "FalconH1ForCausalLM@odd": ("tp2", 1),
    "NemotronHForCausalLM": ("tp2", 1),
    "GraniteMoeHybridForCausalLM@both": ("tp2", 1),
    "Zamba2ForCausalLM": ("tp2", 1),
    "Qwen3NextForCausalLM": ("tp2", 0),
    "FalconForCausalLM@odd": ("tp2", 0),
    "BloomForCausalLM": ("tp2", 0),
    "GptOssForCausalLM@odd": ("tp2", 0),
    "Llama4ForCausalLM": ("tp2-ep", 0),
    "Gemma3ForCausalLM@both": ("tp2", 0),
    "Qwen2_5_VLForConditionalGeneration": ("tp2", 0),
}
"""Name -> (layout, least number of local operations). Where it is 0, copies and reshapes are read off as slices."""

PEER_CASES: dict[str, tuple[str, str, set[str]]] = {
    "LlamaForCausalLM": ("tp2", "exact", set()),
    "Mamba2ForCausalLM": ("tp1", "different", {f"DP0 PP0 TP0: backbone.layers.{n}.mixer.A" for n in range(2)}),
    "FalconForCausalLM": ("tp1", "refused", set()),
}
"""Name -> (layout, the peer's outcome, tensors that it leaves wrong). `A` is `-exp(A_log)`; it copies `A_log`."""


def _check(name: str, layout: str, by_peer: bool, directory: Path, answer: Any) -> None:
    import peer_recorder
    from architectures import LAYOUTS, Outcome, check_plan, cpu_stand_ins, stock_reference

    with cpu_stand_ins():
        found = stock_reference(oracle.corpus_config(name, directory), name, LAYOUTS[layout])
        if not isinstance(found, Outcome):
            found = peer_recorder.check(found) if by_peer else check_plan(found)
    answer.send([found.status, sorted(found.tensors), found.reason, found.operations])


def run_all() -> dict[str, Any]:
    """Every case in a fork of this process: [status, tensors that differ, reason, local operations]."""
    import peer_recorder

    from rdtplan.trace.model import import_vllm

    import_vllm()
    peer_recorder.import_peer()
    context = multiprocessing.get_context("fork")
    found: dict[str, Any] = {}
    cases = [(name, name, layout, False) for name, (layout, _) in CASES.items()]
    cases += [(f"{name} by the peer", name, layout, True) for name, (layout, _, _) in PEER_CASES.items()]
    for key, name, layout, by_peer in cases:
        mine, theirs = context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory() as directory:
            process = context.Process(target=_check, args=(name, layout, by_peer, Path(directory), theirs))
            process.start()
            theirs.close()
            try:
                found[key] = mine.recv()
            except EOFError:
                found[key] = ["died", [], "", 0]
            process.join()
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_an_architecture_is_exact(name: str, outcomes: dict[str, Any]) -> None:
    """Rule: on every rank, every byte of every parameter, buffer and attribute is what stock vLLM leaves."""
    _, least = CASES[name]
    status, tensors, reason, operations = outcomes[name]
    assert (status, tensors, reason) == ("exact", [], "")
    assert operations >= least and (least or not operations)


@pytest.mark.parametrize("name", PEER_CASES)
def test_the_peer_is_judged_by_what_it_leaves(name: str, outcomes: dict[str, Any]) -> None:
    """Rule: the peer, executed in full, is held to the same bytes; an error of its own at init is a refusal."""
    _, wanted, wrong = PEER_CASES[name]
    status, tensors, reason, _ = outcomes[f"{name} by the peer"]
    assert (status, set(tensors)) == (wanted, wrong)
    assert bool(reason) == (status != "exact")


if __name__ == "__main__":
    print(json.dumps(run_all()))
