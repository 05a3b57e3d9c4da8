"""Plans that were written once load for ever; and how a format changes without breaking them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from forgery import forge
from plans import make_plan

from rdtplan.errors import PlanFormatError
from rdtplan.ir import file as plan_file
from rdtplan.ir.file import PlanFile, encode
from rdtplan.ir.plan import FORMAT
from rdtplan.verify import verify_fleet

GOLDEN = Path(__file__).resolve().parent / "golden"
CONTENTS: dict[str, Any] = json.loads((GOLDEN / "contents.json").read_text())
sys.path.insert(0, str(GOLDEN))

import make  # noqa: E402


@pytest.mark.parametrize("name", CONTENTS)
def test_a_golden_plan_still_says_what_it_said(name: str) -> None:
    with PlanFile(GOLDEN / name) as file:
        plan = file.fleet()
        assert make.contents(plan, file.digest) == CONTENTS[name]
        assert file.consumer(0) == plan.consumers[0]
    assert verify_fleet(plan) == []


@pytest.mark.parametrize("name", CONTENTS)
def test_a_newer_minor_version_reads_it_and_finds_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests inside a plan do not hold the version of the format that its reader writes."""
    for module in [m for n, m in sys.modules.items() if n.startswith("rdtplan.") and hasattr(m, "FORMAT")]:
        monkeypatch.setattr(module, "FORMAT", "1.9")
    with PlanFile(GOLDEN / name) as file:
        assert verify_fleet(file.fleet()) == []


def test_every_golden_plan_is_listed() -> None:
    assert sorted(CONTENTS) == sorted(p.name for p in GOLDEN.glob("*.plan"))
    assert any("-experts" in name for name in CONTENTS) and '"length"' in (GOLDEN / "1.0-experts.plan").read_text()


@pytest.mark.parametrize("name", make.SCENARIOS)
def test_the_present_format_writes_the_same_bytes(name: str) -> None:
    """A changed byte is a changed format: raise its version, or, before the release, run tests/golden/make.py."""
    assert encode(make_plan(make.SCENARIOS[name]))[0] == (GOLDEN / f"{FORMAT}-{name}.plan").read_bytes()


def test_an_older_major_version_is_read_through_its_migration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 0 called `nbytes` of a gather group `bytes` and knew no waivers."""
    plan = make_plan()

    def to_version_0(seal: Any, parts: Any) -> None:
        seal["format"] = "0.3"
        del seal["plan"]["waivers"]
        for entry, part in zip(seal["parts"], parts, strict=True):
            if entry["kind"] == "groups":
                for group in part:
                    group["bytes"] = group.pop("nbytes")

    forge(encode(plan)[0], tmp_path / "old", to_version_0)
    with pytest.raises(PlanFormatError) as caught:
        PlanFile(tmp_path / "old")
    assert caught.value.code == "RDT408"

    def from_version_0(kind: str, plain: Any) -> Any:
        if kind == "plan":
            return {**plain, "waivers": []}
        if kind == "groups":
            return [{**{k: v for k, v in g.items() if k != "bytes"}, "nbytes": g["bytes"]} for g in plain]
        return plain

    monkeypatch.setitem(plan_file.MIGRATIONS, 0, from_version_0)
    with PlanFile(tmp_path / "old") as file:
        assert file.fleet() == plan and file.table(0, "chunks") == plan.consumers[0].program.chunks


def test_a_newer_major_version_is_refused(tmp_path: Path) -> None:
    for version in ("2.0", "10.1", "-1.0", "1_0.0", "१.0"):
        forge(encode(make_plan())[0], tmp_path / "new", lambda seal, _, v=version: seal.update(format=v))
        with pytest.raises(PlanFormatError) as caught:
            PlanFile(tmp_path / "new")
        assert caught.value.code == "RDT408"
