"""Compressed plan files: the same plan, and the same refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import zstandard
from plans import Scenario, make_plan

from rdtplan.errors import PlanFormatError
from rdtplan.ir.compression import MAGIC
from rdtplan.ir.file import PlanFile, encode, write_plan
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import InferenceTopology


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
    target.write_bytes(packed + b"x")
    assert refused(target).code == "RDT403"
    target.write_bytes(zstandard.compress(b"no plan\n"))
    assert refused(target).code == "RDT403"


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(zstandard.compress(bytes(64 << 20)))
    error = refused(tmp_path / "bomb")
    assert error.code == "RDT404" and "67,108,864" in error.message
    stream = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    (tmp_path / "bomb").write_bytes(stream)
    assert refused(tmp_path / "bomb").code in ("RDT403", "RDT404")


def test_without_the_package_the_message_says_so(
    tmp_path: Path, plan: FleetPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(plan, tmp_path / "p.zst")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert "rdtplan[zstd]" in refused(tmp_path / "p.zst").fix
    with pytest.raises(PlanFormatError):
        write_plan(plan, tmp_path / "other.zst")
    assert not (tmp_path / "other.zst").exists()
