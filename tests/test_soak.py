"""Many syncs in a row: `tools/soak.py`, short here and whole when slow tests are asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent.parent / "tools" / "soak.py"


def soak(timeout_s: float, *options: str) -> None:
    done = subprocess.run([sys.executable, str(SOAK), *options], capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "end" in done.stdout


@pytest.mark.parametrize("transport", ["local", "nixl"])
def test_thirty_syncs(transport: str) -> None:
    """Right to the byte after each, and no descriptor or thread more at the end."""
    soak(280, "--transport", transport, "--syncs", "30")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["local", "nixl", "ray_rdt"])
def test_a_thousand_syncs(transport: str) -> None:
    soak(3500, "--transport", transport)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["local", "nixl"])
def test_a_thousand_syncs_of_vllm(transport: str) -> None:
    soak(3500, "--transport", transport, "--vllm", "--check-every", "10")
