"""Plans for GPU targets, from a machine that has no GPU: tests/quantized.py does the work, a process a target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

import rdtplan
from rdtexec.plans import load_worker
from rdtplan.errors import InputError, PlanMismatch, TraceError
from rdtplan.expected import prediction_layers
from rdtplan.inputs.config_manifest import manifest_from_config
from rdtplan.inputs.manifests import to_json
from rdtplan.inputs.quantized import quantized
from rdtplan.ir.manifest import SourceTensor
from rdtplan.ir.targets import TARGETS, target_name
from tests import oracle
from tests import quantized as cases

ROOT = Path(__file__).resolve().parent.parent
REFUSED_BY_VLLM = {"gptq-act-order"}
OF_TARGET = {"sm90": list(cases.CASES), "sm100": ["mxfp4", "bf16-narrow-moe"]}
"""What the quick suite runs: one target with everything, and where another differs."""

Outcomes = dict[str, dict[str, Any]]


def run(target: str, names: list[str]) -> Outcomes:
    """What tests/quantized.py finds for some cases on one target."""
    command = [sys.executable, str(ROOT / "tests" / "quantized.py"), target, *names]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=ROOT, env={**_environment(), "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def outcomes() -> Callable[[str], Outcomes]:
    """Outcomes of the quick suite by target, each target run once."""
    found: dict[str, Outcomes] = {}

    def of(target: str) -> Outcomes:
        if target not in found:
            found[target] = run(target, OF_TARGET[target])
        return found[target]

    return of


@pytest.mark.parametrize(("target", "name"), [(t, n) for t, names in OF_TARGET.items() for n in names])
def test_a_quantized_model_is_exact(target: str, name: str, outcomes: Callable[[str], Outcomes]) -> None:
    """Rule: on every rank, every byte of every parameter and buffer is what stock vLLM leaves on that target."""
    found = outcomes(target)[name]
    if name in REFUSED_BY_VLLM:
        assert found["status"] == "vllm", found
        return
    assert (found["status"], found.get("tensors")) == ("exact", {}), found
    assert found["target"] == target
    assert len(found["parameters"]) > 15


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_all_cases_are_exact(target: str) -> None:
    """The same for everything on every target."""
    found = run(target, list(cases.CASES))
    assert {n for n, o in found.items() if o["status"] != "exact"} == REFUSED_BY_VLLM
    assert set(found) == set(cases.CASES)


def test_targets_differ(outcomes: Callable[[str], Outcomes]) -> None:
    """Kernels of different targets pad experts differently: hidden 320 stays 320 on sm90, and is 512 on sm100."""
    shapes = {
        target: {name: shape for name, _, shape in outcomes(target)["mxfp4"]["parameters"]} for target in OF_TARGET
    }
    name = "model.layers.0.mlp.experts.routed_experts.w2_bias"
    assert {target: shape[name] for target, shape in shapes.items()} == {"sm90": [8, 320], "sm100": [8, 512]}
    assert len({outcomes(target)["mxfp4"]["identity"] for target in OF_TARGET}) == 2


def test_every_reason_is_named(outcomes: Callable[[str], Outcomes]) -> None:
    """What is left alone or goes nowhere is in the plan's notes, with why."""
    found = {name: " ".join(o.get("notes", ())) for name, o in outcomes("sm90").items()}
    assert "vLLM sets the scales of a KV cache by itself" in found["fp8-blocks"]
    assert "input_scale goes afterwards, and the last one stays" in found["fp8-tensors-moe"]
    assert "vLLM drops the biases of experts" in found["gptq-moe"]
    assert "*.g_idx go nowhere" in found["gptq"]
    assert "the draft model takes this weight from the model" in found["mtp"]
    assert found["bf16"] == found["awq"] == ""


def test_the_draft_model_is_watched(outcomes: Callable[[str], Outcomes]) -> None:
    """A worker that decodes speculatively has both models' parameters in its plan; what they share is there once."""
    names = {name: [n for n, _, _ in outcomes("sm90")[name]["parameters"]] for name in ("mtp", "eagle", "draft")}
    assert "draft.model.layers.2.mtp_block.self_attn.o_proj.weight" in names["mtp"]
    assert "draft.model.layers.2.eh_proj.weight" in names["mtp"]
    assert not [n for n in names["mtp"] if n.startswith("draft.") and ("embed" in n or "head.head" in n)]
    assert "draft.model.fc.weight" in names["eagle"] and "draft.model.embed_tokens.weight" not in names["eagle"]
    assert "draft.model.embed_tokens.weight" in names["draft"] and "draft.lm_head.weight" in names["draft"]


def test_compile_in_a_process_of_its_own(tmp_path: Path, outcomes: Callable[[str], Outcomes]) -> None:
    """From a process of this machine's platform: the same plan, with the target in its header, and progress."""
    config_dir, entries, _ = cases.model_dir(cases.CASES["fp8-blocks"], tmp_path / "model")
    steps: list[tuple[str, int, int]] = []
    plan = rdtplan.compile(
        config_dir, entries, tensor_parallel=2, target="sm90", progress=lambda *step: steps.append(step)
    )
    assert plan.compiler.target == "sm90"
    assert plan.identity == outcomes("sm90")["fp8-blocks"]["identity"]
    assert ("tracing worker ranks", 2, 2) in steps
    loaders = plan.consumers[0].program.provenance.loaders
    assert len(loaders) > 3 and not [loader for loader in loaders if "vllm/" not in loader], loaders
    path = tmp_path / "fleet.plan"
    rdtplan.save(plan, path)
    load_worker(path, 1, target="sm90")
    with pytest.raises(PlanMismatch, match=r"target sm90, this worker runs on cpu") as refused:
        load_worker(path, 1, target="cpu")
    assert refused.value.code == "RDT516"


def test_prediction_layer_without_speculation(tmp_path: Path) -> None:
    """A checkpoint's prediction layer that nobody loads is one note; a layer that the config has not is an error."""
    config, entries = cases.drafts.target("mtp")
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = rdtplan.compile(tmp_path, entries, jobs=1)
    assert [w.pattern for w in plan.waivers] == ["model.layers.2.*"]
    (note,) = plan.notes
    assert note.startswith("44 source names model.layers.2.* go nowhere") and "--speculative-config" in note
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(TraceError, match=r"layers\.2\."):
        rdtplan.compile(tmp_path, entries, jobs=1)


# -- refusals and small rules --------------------------------------------------------------------------------------


def test_unknown_target(tmp_path: Path) -> None:
    oracle.corpus_config("LlamaForCausalLM", tmp_path)
    with pytest.raises(InputError, match="sm70") as refused:
        rdtplan.compile(
            tmp_path / "LlamaForCausalLM", oracle.corpus_manifest("LlamaForCausalLM"), target="sm70", jobs=1
        )
    assert refused.value.code == "RDT116"
    assert all(name in refused.value.fix for name in ("auto", "cpu", *TARGETS))


def test_errors_cross_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the tracing process is raised here as it was there; one that dies is named."""
    entries = oracle.corpus_manifest("LlamaForCausalLM")
    config_dir = oracle.corpus_config("LlamaForCausalLM", tmp_path)
    with pytest.raises(TraceError, match=r"layers\.1\.mlp\.down_proj\.weight") as refused:
        wrong = [evolve(e, shape=(3, 3)) if e.name == "model.layers.1.mlp.down_proj.weight" else e for e in entries]
        rdtplan.compile(config_dir, wrong, target="sm80", jobs=1)
    assert refused.value.code == "RDT207"
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TraceError, match="died without an answer") as died:
        rdtplan.compile(config_dir, entries, target="sm80", jobs=1)
    assert died.value.code == "RDT217"


@pytest.mark.parametrize("ending", ["refused", "killed"])
def test_no_process_outlives_a_compile(ending: str, tmp_path: Path) -> None:
    """The tracing process and its workers end with the command: it is refused by one of them, or killed."""
    config_dir = oracle.corpus_config("Llama4ForCausalLM", tmp_path)
    redundant = ["--redundant-experts", "2"] if ending == "refused" else []  # its loader does not run with any
    command = [sys.executable, "-m", "rdtplan.cli", "compile", str(config_dir), "--tp", "2", "--ep", *redundant]
    command += ["--target", "sm90", "--jobs", "2", "-o", str(tmp_path / "x.plan")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, env=_environment())
    try:
        if ending == "killed":
            _wait_for(lambda: len(_descendants(process.pid)) >= 3)  # the tracing process and its two workers
            process.kill()
        output, _ = process.communicate(timeout=200)  # every process that is left holds this pipe
    finally:
        process.kill()
    if ending == "refused":
        assert process.returncode == 1
        assert b"RDT207" in output and b"vllm/model_executor/models/llama4.py:" in output
    assert not (tmp_path / "x.plan").exists()


def _descendants(pid: int) -> list[int]:
    children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(d for child in children for d in _descendants(child))]


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("when", ["late", pytest.param("twice", marks=pytest.mark.slow)])
def test_a_process_has_one_target(when: str) -> None:
    """Installing another target, or one into a process in which vLLM has chosen already, is refused."""
    code = """
from rdtplan.errors import TraceError
from rdtplan.trace import platform
def refused(target):
    try:
        platform.install(target)
    except TraceError as error:
        return error.code
    return ""
import sys
if sys.argv[1] == "late":
    assert platform.live_target() == "cpu"
    assert refused("sm90") == "RDT216"
else:
    platform.install("sm80")
    platform.install("sm80")
    assert platform.live_target() == platform.installed() == "sm80" and platform.is_here("sm80")
    assert refused("sm90") == refused("cpu") == "RDT216"
"""
    done = subprocess.run(
        [sys.executable, "-c", code, when], capture_output=True, text=True, cwd=ROOT, env=_environment()
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_target_names() -> None:
    assert target_name("cuda", (9, 0)) == "sm90" and target_name("cuda", (10, 0)) == "sm100"
    assert target_name("cpu", None) == "cpu" and target_name("rocm", None) == "rocm"
    assert {target_name("cuda", t.capability) for t in TARGETS.values()} == set(TARGETS)


def test_prediction_layers() -> None:
    config = {"num_hidden_layers": 61, "num_nextn_predict_layers": 2}
    assert prediction_layers(config)[:2] == ("model.layers.61.*", "model.layers.62.*")
    assert prediction_layers({"text_config": config})[0] == "model.layers.61.*"
    assert not any("layers.61" in p for p in prediction_layers({"num_hidden_layers": 61}))


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM@fp8", "GptOssForCausalLM@mxfp4"])
def test_manifest_of_a_quantized_config(name: str, tmp_path: Path) -> None:
    """Without a checkpoint the names, types and shapes come from the config, quantization included."""
    made = manifest_from_config(oracle.corpus_config(name, tmp_path))
    assert {e.name: e for e in made} == {e.name: e for e in oracle.corpus_manifest(name)}


def test_unknown_quantization() -> None:
    entry = SourceTensor("model.layers.0.mlp.up_proj.weight", "bfloat16", (64, 64))
    with pytest.raises(InputError) as refused:
        quantized([entry], {"quant_method": "bitsandbytes"})
    assert refused.value.code == "RDT118"


@pytest.mark.slow
def test_deepseek_v3_small(tmp_path: Path) -> None:
    """The full model at 4 layers and 16 experts: FP8 blocks, sm90, TP8 and EP8, the model and its draft model."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import deepseek_v3
    finally:
        sys.path.pop(0)
    deepseek_v3.write(tmp_path, layers=4, experts=16)
    plan = rdtplan.compile(
        tmp_path,
        tmp_path / "manifest.json",
        tensor_parallel=8,
        expert_parallel=True,
        trainer_ranks=16,
        target="sm90",
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )
    parameters = plan.consumers[0].program.parameters
    shapes = dict(zip(parameters.names, zip(parameters.dtypes, parameters.shapes, strict=True), strict=True))
    assert shapes["model.layers.3.mlp.experts.routed_experts.w13_weight"] == ("float8_e4m3fn", (2, 4096, 7168))
    assert shapes["draft.model.layers.4.mtp_block.mlp.experts.routed_experts.w2_weight_scale_inv"] == (
        "float32",
        (2, 56, 16),
    )
    assert len(plan.consumers) == 8 and plan.compiler.target == "sm90"


def test_cli_speculative_config(tmp_path: Path) -> None:
    """What is no JSON object is refused before anything is imported."""
    from click.testing import CliRunner

    from rdtplan.cli import main

    config_dir = oracle.corpus_config("LlamaForCausalLM", tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(to_json(oracle.corpus_manifest("LlamaForCausalLM")))
    for text in ("mtp", "[1]"):
        arguments = ["compile", str(config_dir), "--manifest", str(manifest), "-o", str(tmp_path / "x.plan")]
        done = CliRunner().invoke(main, [*arguments, "--speculative-config", text])
        assert done.exit_code == 1 and "RDT117" in done.output, done.output
