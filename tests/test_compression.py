"""Compressed plan files: the same plan, and the same refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from plans import Scenario, make_plan

from rdtplan.errors import PlanFormatError
from rdtplan.ir import compression
from rdtplan.ir.compression import EXPANSION, FREE_NBYTES, MAGIC
from rdtplan.ir.file import PlanFile, encode, write_plan
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import InferenceTopology

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def plan() -> FleetPlan:
    return make_plan(Scenario(topology=InferenceTopology(2)))


def test_a_compressed_plan_is_the_same_plan(tmp_path: Path, plan: FleetPlan) -> None:
    digest = write_plan(plan, tmp_path / "a.plan.zst")
    assert digest == write_plan(plan, tmp_path / "a.plan")
    packed = (tmp_path / "a.plan.zst").read_bytes()
    assert packed.startswith(MAGIC) and 3 * len(packed) < len(encode(plan)[0])
    (tmp_path / "renamed").write_bytes(packed)
    for name in ("a.plan.zst", "renamed"):
        with PlanFile(tmp_path / name) as file:
            assert file.digest == digest and file.fleet() == plan and file.consumer(1) == plan.consumers[1]


def refused(path: Path) -> PlanFormatError:
    with pytest.raises(PlanFormatError) as caught, PlanFile(path) as file:
        file.fleet()
    assert path.name in caught.value.message
    return caught.value


def test_damage_is_refused(tmp_path: Path, plan: FleetPlan) -> None:
    target = tmp_path / "p.zst"
    write_plan(plan, target)
    packed = target.read_bytes()
    for at in range(4, len(packed), len(packed) // 60):
        for spoiled in (packed[:at], packed[:at] + bytes([packed[at] ^ 4]) + packed[at + 1 :]):
            target.write_bytes(spoiled)
            assert refused(target).code in ("RDT403", "RDT404"), at
    for at in (len(packed) // 100, len(packed) // 2, len(packed) - 1):
        target.write_bytes(packed[:at])
        assert refused(target).code == "RDT403", at
    target.write_bytes(packed + b"x")
    assert refused(target).code == "RDT403"
    target.write_bytes(zstandard.compress(b"no plan\n"))
    assert refused(target).code == "RDT402"


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(zstandard.compress(bytes(64 << 20)))
    error = refused(tmp_path / "bomb")
    assert error.code == "RDT404" and "67,108,864" in error.message
    stream = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    (tmp_path / "bomb").write_bytes(stream)
    assert refused(tmp_path / "bomb").code in ("RDT403", "RDT404")


def test_a_large_plan_that_is_cut_is_called_truncated(tmp_path: Path) -> None:
    """However little of it is left: what it says of its size is what the whole had."""
    data = b"".join(k.to_bytes(2, "big") * 200 for k in range(1 << 14))
    packed = zstandard.compress(data)
    assert len(packed) * EXPANSION > len(data) > FREE_NBYTES + EXPANSION * 1000
    for at in (20, 1000, len(packed) // 2):
        (tmp_path / "cut").write_bytes(packed[:at])
        error = refused(tmp_path / "cut")
        assert error.code == "RDT403", (at, error.message)
    assert refused(tmp_path / "cut").code == "RDT403"


@pytest.mark.parametrize("name", ["p", "p.zst"])
def test_a_plan_comes_through_a_pipe(tmp_path: Path, plan: FleetPlan, name: str) -> None:
    """As `cat fleet.plan | rdtplan inspect /dev/stdin` gives it."""
    write_plan(plan, tmp_path / name)
    with PlanFile(tmp_path / name) as file:
        size = file.nbytes
    for command in ("inspect", "verify", "mem"):
        done = subprocess.run(
            [sys.executable, "-m", "rdtplan.cli", command, "/dev/stdin", "--json"],
            stdin=subprocess.Popen(["cat", tmp_path / name], stdout=subprocess.PIPE).stdout,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        if command == "inspect":
            assert json.loads(done.stdout)["plan"]["format_nbytes"] == size


def test_a_pipe_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compression, "PIPED_NBYTES", 1000)
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["sh", "-c", f"head -c 100000 /dev/zero > {tmp_path}/pipe"], stderr=subprocess.DEVNULL):
        error = refused(tmp_path / "pipe")
    assert error.code == "RDT404" and "more than 1,000 bytes" in error.message


def test_without_the_package_the_message_says_so(
    tmp_path: Path, plan: FleetPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(plan, tmp_path / "p.zst")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert "rdtplan[zstd]" in refused(tmp_path / "p.zst").fix
    with pytest.raises(PlanFormatError):
        write_plan(plan, tmp_path / "other.zst")
    assert not (tmp_path / "other.zst").exists()
