"""The library as a user imports it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve
from plans import Scenario, make_plan

import rdtplan
from rdtplan.errors import InputError, PlanFormatError
from rdtplan.inputs.manifests import read_manifest
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import InferenceTopology, TransferSettings

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "corpus"


def test_a_plan_is_saved_and_loaded(tmp_path: Path) -> None:
    plan = make_plan(Scenario(topology=InferenceTopology(2)))
    digest = rdtplan.save(plan, tmp_path / "p")
    assert len(digest) == 64 and rdtplan.load(tmp_path / "p") == plan
    assert rdtplan.check(plan) == rdtplan.check(tmp_path / "p") == []
    with pytest.raises(PlanFormatError):
        rdtplan.load(tmp_path / "none")


def test_plans_and_files_are_compared_alike(tmp_path: Path) -> None:
    one = make_plan(Scenario(topology=InferenceTopology(2)))
    other = make_plan(Scenario(topology=InferenceTopology(4)))
    rdtplan.save(one, tmp_path / "one")
    rdtplan.save(other, tmp_path / "other")
    found = rdtplan.diff(one, other)
    assert found == rdtplan.diff(tmp_path / "one", other) == rdtplan.diff(str(tmp_path / "one"), tmp_path / "other")
    assert found.cause == "TP 2 -> 4" and not found.same
    assert rdtplan.diff(one, tmp_path / "one").same


def test_wrong_arguments_are_named() -> None:
    redundant = ROOT / "tests" / "golden" / "1.0-redundant.plan"
    for placement in (None, 3, [[0, 1]], {"layer": "01"}):
        with pytest.raises(InputError, match="expected") as caught:
            rdtplan.place_experts(redundant, placement)  # type: ignore[arg-type]
        assert caught.value.code == "RDT120"
    with pytest.raises(InputError, match=r"manifest: entry 0 is \('a', 'b', \(1,\)\), a tuple") as caught:
        rdtplan.check(redundant, manifest=[("a", "b", (1,))])  # type: ignore[list-item]
    assert caught.value.code == "RDT104" and "SourceTensor" in caught.value.fix
    with pytest.raises(PlanFormatError, match="the path is empty"):
        rdtplan.load("")


def test_findings_of_a_plan_that_is_wrong() -> None:
    plan = make_plan()
    assert [f.names for f in rdtplan.check(evolve(plan, manifest_digest="0" * 64))] == [("manifest_digest",)]


def test_compile_is_the_function_whatever_was_imported(tmp_path: Path) -> None:
    """Same plan from a path and from entries; the names do not shadow each other."""
    config, manifest = tmp_path / "model", CORPUS / "manifests" / "LlamaForCausalLM.json"
    config.mkdir()
    (config / "config.json").write_text((CORPUS / "configs" / "LlamaForCausalLM.json").read_text())
    plan = rdtplan.compile(config, manifest, tensor_parallel=2, trainer_ranks=2, jobs=1)
    assert isinstance(plan, FleetPlan) and callable(rdtplan.compile) and callable(rdtplan.check)
    again = rdtplan.compile(
        str(config),
        read_manifest(manifest),
        tensor_parallel=2,
        trainer_ranks=2,
        settings=TransferSettings(num_rdt_buffers=3),
        jobs=1,
    )
    assert rdtplan.diff(plan, again).cause == "num_rdt_buffers (K) 2 -> 3"
    with pytest.raises(InputError):
        rdtplan.compile(config, manifest, tensor_parallel=0)


def test_importing_costs_nothing() -> None:
    code = "import sys; import rdtplan; print([m for m in ('attrs', 'orjson', 'torch', 'click') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert shown.strip() == "[]"


def test_the_api_page_names_every_function() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert all(f"rdtplan.{name}(" in page for name in rdtplan.__all__)
