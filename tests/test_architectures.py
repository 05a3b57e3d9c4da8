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


def _check(name: str, layout: str, directory: Path, answer: Any) -> None:
    from architectures import LAYOUTS, check, cpu_stand_ins

    with cpu_stand_ins():
        found = check(oracle.corpus_config(name, directory), name, LAYOUTS[layout])
    answer.send([found.status, sorted(found.tensors), found.reason, found.operations])


def run_all() -> dict[str, Any]:
    """Every case in a fork of this process: [status, tensors that differ, reason, local operations]."""
    from rdtplan.trace.model import import_vllm

    import_vllm()
    context = multiprocessing.get_context("fork")
    found: dict[str, Any] = {}
    for name, (layout, _) in CASES.items():
        mine, theirs = context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory() as directory:
            process = context.Process(target=_check, args=(name, layout, Path(directory), theirs))
            process.start()
            theirs.close()
            try:
                found[name] = mine.recv()
            except EOFError:
                found[name] = ["died", [], "", 0]
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


if __name__ == "__main__":
    print(json.dumps(run_all()))
