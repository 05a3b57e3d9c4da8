"""Speculative decoding inside vLLM: one sync writes both models. tests/vllm_draft.py does the work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_one_sync_writes_both_models(method: str, tmp_path: Path) -> None:
    """After every sync both models are those of a fresh engine, bit for bit; a draft model that a plan leaves out is
    refused, unless it is to be kept."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, str(ROOT / "tests" / "vllm_draft.py"), str(tmp_path), method]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["before"] is False and found["compared"] > 10
    assert found["left out"].startswith("RDT517") and "draft model would keep old weights" in found["left out"]
    assert found["compiled at init"].startswith("RDT517")  # the live model alone is traced
    assert found["client cannot show"].startswith("RDT111")
    assert found["syncs"] == [{"generation_equal": True, "model": [], "draft": []}] * 2
    assert found["left out on purpose"] is True
