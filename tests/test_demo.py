"""The demo, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def demo(*options: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "rdtplan.cli", "demo", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_demo_is_byte_exact_over_every_transport(tmp_path: Path) -> None:
    """Three syncs over each transport; every parameter and buffer of both workers equals stock load_weights."""
    code, result = demo("--dir", str(tmp_path))
    assert code == 0
    assert set(result["transports"]) == {"local", "nixl"}
    for of in result["transports"].values():
        assert of["wrong"] == [] and of["compared"] > 300 and len(of["seconds"]) == 3
    assert max(result["bytes_per_worker"]) < 0.6 * result["bytes_broadcast"]
    assert (tmp_path / "fleet.plan").exists()


def test_demo_fails_when_one_byte_is_flipped() -> None:
    """One bit of one weight, flipped on the way, is named for every sync and transport, and the exit code is 1."""
    code, result = demo("--fault", "flip-byte")
    assert code == 1
    for of in result["transports"].values():
        assert len(of["wrong"]) == 3
        assert all(w.endswith("model.layers.1.self_attn.o_proj.weight") for w in of["wrong"])
