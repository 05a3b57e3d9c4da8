"""Architectures whose loaders do more than copy slices, against stock vLLM: one of each kind; `tools/sweep` has all.

Every model runs in a forked process, as in the sweep: what the CPU build lacks is stood in for there, and only there.
"""

from __future__ import annotations

import multiprocessing
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
        answer.send(check(oracle.corpus_config(name, directory), name, LAYOUTS[layout]))


@pytest.mark.parametrize("name", CASES)
def test_an_architecture_is_exact(name: str, tmp_path: Path) -> None:
    """Rule: on every rank, every byte of every parameter, buffer and attribute is what stock vLLM leaves."""
    from rdtplan.trace.model import import_vllm

    import_vllm()
    layout, operations = CASES[name]
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(name, layout, tmp_path, theirs))
    process.start()
    theirs.close()
    outcome = mine.recv()
    process.join()
    assert (outcome.status, outcome.tensors, outcome.reason) == ("exact", {}, "")
    assert outcome.operations >= operations and (operations or not outcome.operations)
