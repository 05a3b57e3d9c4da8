"""The command line as a user meets it: exit codes, messages, and what it does not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
from attrs import evolve
from click.testing import CliRunner, Result

import rdtplan
from rdtplan.cli import main
from rdtplan.ir.file import write_plan
from rdtplan.ir.schema import plan_schema
from tests.forgery import with_digests
from tests.plans import Scenario, make_plan

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "corpus"


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


def fails(result: Result, *words: str) -> None:
    """Exit code 1, one message with all the words, no traceback."""
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output, result.output


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A config directory of a small Llama, with its manifest beside the config."""
    (tmp_path / "config.json").write_text((CORPUS / "configs" / "LlamaForCausalLM.json").read_text())
    (tmp_path / "manifest.json").write_text((CORPUS / "manifests" / "LlamaForCausalLM.json").read_text())
    return tmp_path


def put(column: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*column[:at], value, *column[at + 1 :])


def rows(model: Path) -> list[list[object]]:
    return json.loads((model / "manifest.json").read_text())


def compile_rows(model: Path, entries: list[list[object]], *options: str) -> Result:
    (model / "changed.json").write_text(json.dumps(entries))
    return run(
        "compile", model, "--manifest", model / "changed.json", "-o", model / "out.plan", "--jobs", "1", *options
    )


def test_compile_inspect_verify(model: Path) -> None:
    """The main path: a plan is written, shown and found sound."""
    result = run(
        "compile", model, "--manifest", model / "manifest.json", "--tp", "2", "--trainer-ranks", "2", "-o", model / "p"
    )
    assert result.exit_code == 0, result.output
    assert "2 workers" in result.output
    shown = run("inspect", model / "p")
    assert shown.exit_code == 0 and "LlamaForCausalLM" in shown.output and "TP2" in shown.output
    summary = json.loads(run("inspect", "--json", model / "p").output)
    assert summary["fleet"]["workers"] == 2 and len(summary["workers"]) == 2
    sound = run("verify", model / "p")
    assert sound.exit_code == 0 and "every element is written once" in sound.output
    checked = json.loads(run("verify", "--json", model / "p").output)
    assert checked["findings"] == [] and checked["sound"]


def test_verify_against_the_loaders(model: Path) -> None:
    """A plan in which gate and up are exchanged is sound by itself; the loaders know better, and name the place."""
    manifest = model / "manifest.json"
    result = run("compile", model, "--manifest", manifest, "--tp", "2", "--jobs", "1", "-o", model / "p")
    assert result.exit_code == 0, result.output
    same = run("verify", model / "p", "--model", model, "--manifest", manifest, "--jobs", "1")
    assert same.exit_code == 0 and "the loaders of vllm 0.3" in same.output, same.output
    plan = rdtplan.load(model / "p")
    gate, up = (plan.manifest.names.index(f"model.layers.1.mlp.{n}_proj.weight") for n in ("gate", "up"))
    for consumer in plan.consumers:
        keys = consumer.program.keys
        marked = tuple({gate: up, up: gate}.get(k, k) for k in keys.source)
        program = evolve(consumer.program, keys=evolve(keys, source=marked))
        plan = evolve(plan, consumers=put(plan.consumers, consumer.consumer_id, evolve(consumer, program=program)))
    write_plan(with_digests(plan), model / "forged")
    assert run("verify", model / "forged").exit_code == 0
    result = run("verify", model / "forged", "--model", model, "--jobs", "1")
    fails(result, "RDT332", "worker 1 (DP0 PP0 TP1): 'model.layers.1.mlp.gate_up_proj.weight' [0:128, :]")
    assert "the plan takes 'model.layers.1.mlp.up_proj.weight' [128:256, :], the loader takes" in result.output
    assert {f.code for f in rdtplan.check(model / "forged", model)} == {"RDT332"}
    (model / "changed.json").write_text(json.dumps(rows(model)[1:]))
    fails(run("verify", model / "p", "--manifest", model / "changed.json"), "RDT333", str(rows(model)[0][0]))


def test_compiling_twice_gives_the_same_bytes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In another process, from another directory, with another hash seed."""
    other = tmp_path_factory.mktemp("elsewhere") / "deeper"
    other.mkdir()
    for name in ("config.json", "manifest.json"):
        (other / name).write_bytes((model / name).read_bytes())
    plans = []
    for directory, seed in ((model, "0"), (other, "4242")):
        command = [sys.executable, "-m", "rdtplan.cli", "compile", ".", "--manifest", "manifest.json"]
        command += ["--tp", "2", "-o", "fleet.plan"]
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
        subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True, timeout=120)
        plans.append((directory / "fleet.plan").read_bytes())
    assert plans[0] == plans[1]
    assert str(ROOT).encode() not in plans[0] and str(model).encode() not in plans[0]


def test_missing_config(tmp_path: Path) -> None:
    fails(run("compile", tmp_path, "-o", tmp_path / "p"), "RDT101", f"no config.json in {tmp_path}")


def test_unknown_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    result = run("compile", model, "--manifest", model / "manifest.json", "-o", model / "p")
    fails(result, "RDT102", "NoSuchForCausalLM", "what to do")


def test_a_name_that_the_model_does_not_know(model: Path) -> None:
    """vLLM's loader stumbles over it; the error names it and the loader's line."""
    result = compile_rows(model, [*rows(model), ["model.layers.0.surprise.weight", "bfloat16", [4]]])
    fails(result, "RDT207", "model.layers.0.surprise.weight", ".py:")


def test_a_name_that_no_loader_takes(model: Path) -> None:
    """vLLM skips such names without a word; the plan refuses them unless they are waived."""
    entries = [*rows(model), ["model.layers.0.self_attn.rotary_emb.inv_freq", "float32", [16]]]
    fails(compile_rows(model, entries), "RDT320", "rotary_emb.inv_freq", "--waive RDT320:PATTERN")
    assert compile_rows(model, entries, "--waive", "RDT320:*.inv_freq").exit_code == 0
    assert "(1 finding waived)" in run("verify", model / "out.plan").output
    checked = json.loads(run("verify", model / "out.plan", "--json").output)
    assert checked["sound"] and [(f["severity"], f["waived"]) for f in checked["findings"]] == [("error", True)]


def test_a_missing_name_leaves_a_parameter_partly_loaded(model: Path) -> None:
    entries = [r for r in rows(model) if r[0] != "model.layers.1.self_attn.k_proj.weight"]
    fails(compile_rows(model, entries), "RDT311", "model.layers.1.self_attn.qkv_proj.weight", "never written")


def test_a_missing_module_is_named(model: Path) -> None:
    entries = [r for r in rows(model) if r[0] != "model.norm.weight"]
    fails(compile_rows(model, entries), "RDT310", "no loader writes parameter 'model.norm.weight'")


def test_non_contiguous_layers_are_reordered_with_a_note(model: Path) -> None:
    entries = rows(model)
    moved = next(r for r in entries if r[0] == "model.layers.0.input_layernorm.weight")
    entries.remove(moved)
    result = compile_rows(model, [*entries, moved])
    assert result.exit_code == 0 and "note: manifest reordered" in result.output


def test_an_ownerless_name(model: Path) -> None:
    (model / "owners.toml").write_text('[[own]]\nnames = "model.*"\nranks = [0]\n')
    result = compile_rows(model, rows(model), "--owners", str(model / "owners.toml"))
    fails(result, "RDT301", "no trainer rank owns 'lm_head.weight'")


def test_wrong_settings_are_refused_together(model: Path) -> None:
    result = compile_rows(model, rows(model), "--tp", "0", "--num-rdt-buffers", "0", "--target", "sm12")
    fails(result, "RDT108", "--tp must be", "--num-rdt-buffers must be", "'sm12'")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-chunk-mb", "nan"), "--max-chunk-mb must be 0 or more, is nan"),
        (("--max-chunk-mb", "inf"), "--max-chunk-mb must be 0 or more, is inf"),
        (("--max-chunk-mb", "-1"), "--max-chunk-mb must be 0 or more, is -1"),
        (("--buffer-presize-gb", "nan"), "--buffer-presize-gb must be 0 or more, is nan"),
        (("--jobs", "0"), "--jobs must be 1 or more, is 0"),
        (("--redundant-experts", "-2"), "--redundant-experts must be 0 or more, is -2"),
    ],
    ids=" ".join,
)
def test_numbers_out_of_range_are_named_as_options(model: Path, options: tuple[str, str], words: str) -> None:
    fails(run("compile", model, "--manifest", model / "manifest.json", "-o", model / "p", *options), "RDT108", words)


def test_options_without_their_partner_are_refused(tmp_path: Path) -> None:
    write_plan(make_plan(Scenario()), tmp_path / "p")
    for option, value in (("--jobs", "2"), ("--speculative-config", "{}")):
        fails(run("verify", tmp_path / "p", option, value), "RDT108", f"{option} without --model")
    fails(run("simulate", tmp_path / "p", "--actual-sync", "1"), "RDT108", "--actual-sync without --actual")


WRONG = [["nonsense"], ["--nonsense"], ["inspect"], ["inspect", "p", "--nonsense"], ["diff", "p"], ["compile"]]


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_usage_is_one_exit_code(arguments: list[str]) -> None:
    """2 is for plans that differ, whoever scripts `diff`."""
    fails(run(*arguments), "Usage:")


def test_a_missing_output_directory_is_seen_before_the_work(model: Path) -> None:
    result = run("compile", model, "--manifest", model / "manifest.json", "-o", model / "no" / "p")
    fails(result, "RDT108", str(model / "no"))


def test_what_cannot_be_the_output_is_seen_before_the_work(model: Path) -> None:
    """A directory, a pipe, or a file that the command reads."""
    os.mkfifo(model / "pipe")
    manifest = model / "manifest.json"
    before = manifest.read_bytes()
    for output, words in ((model, "a directory"), (model / "pipe", "a pipe"), (manifest, "which this command reads")):
        fails(run("compile", model, "--manifest", manifest, "-o", output), "RDT108", "--output", words)
        fails(run("manifest", manifest, "-o", output), "RDT108", "--output", words)
    assert manifest.read_bytes() == before and (model / "pipe").is_fifo()


def test_findings_are_counted_rather_than_all_printed(model: Path) -> None:
    """Against the manifest of another model every name is a finding."""
    plan = make_plan(Scenario())
    write_plan(plan, model / "p")
    arguments = ("verify", model / "p", "--manifest", model / "manifest.json")
    every = json.loads(run(*arguments, "--json").output)
    count = len(every["findings"])
    assert count > 20 and not every["sound"] and {f["severity"] for f in every["findings"]} == {"error"}
    shown = run(*arguments)
    fails(shown, f"... and {count - 8} more of RDT333; --json lists all")
    assert len(shown.output.splitlines()) == 9
    narrow = CliRunner(env={"COLUMNS": "60"}).invoke(main, [str(a) for a in arguments])
    assert max(map(len, narrow.output.splitlines())) <= 60


def test_a_damaged_plan_is_refused_with_one_message(tmp_path: Path) -> None:
    write_plan(make_plan(Scenario()), tmp_path / "p")
    data = (tmp_path / "p").read_bytes()
    (tmp_path / "short").write_bytes(data[: len(data) // 2])
    for command in ("inspect", "verify"):
        fails(run(command, tmp_path / "short"), "RDT403", "truncated")
        fails(run(command, tmp_path / "nowhere"), "RDT401")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", [["inspect", "PLAN"], ["verify", "PLAN", "--json"], ["--help"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_takes_no_more_is_one_line(tmp_path: Path, arguments: list[str], unbuffered: str) -> None:
    write_plan(make_plan(Scenario()), tmp_path / "p")
    command = [sys.executable, "-m", "rdtplan.cli", *(str(tmp_path / "p") if a == "PLAN" else a for a in arguments)]
    with open("/dev/full", "w") as full:
        env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    assert done.returncode == 1, done
    assert done.stderr.startswith("error RDT108: cannot write the output: No space left on device"), done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_colours_can_be_turned_off(tmp_path: Path) -> None:
    """As no-color.org has it, and on terminals that know none."""
    write_plan(make_plan(Scenario()), tmp_path / "p")
    for arguments in (["inspect", str(tmp_path / "p")], ["inspect", str(tmp_path / "none")]):
        for environment, colours in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
            env = {"NO_COLOR": None, "TERM": "xterm", **environment}
            shown = CliRunner(env=env).invoke(main, arguments, color=True)
            assert ("\x1b" in shown.output) == colours, (arguments, environment)


def test_manifest_command_reads_headers_and_configs(model: Path, tmp_path: Path) -> None:
    """From a config alone the names are those of the checkpoint that transformers would save."""
    result = run("manifest", model, "-o", tmp_path / "m.json")
    assert result.exit_code == 0, result.output
    made = json.loads((tmp_path / "m.json").read_text())
    assert sorted(map(str, made)) == sorted(map(str, rows(model)))
    assert made[0][0] == "model.embed_tokens.weight" and made[-1][0] == "lm_head.weight"


def test_help_explains_a_code() -> None:
    assert "no trainer rank" in run("help", "RDT301").output.lower()
    fails(run("help", "RDT999"), "RDT999", "docs/findings.md")
    fails(run("help", "rdt30"), "codes like it: RDT")


@pytest.mark.parametrize("command", ["compile", "demo"])
def test_commands_that_need_vllm_say_so(command: str, model: Path) -> None:
    """After `pip install rdtplan` alone: one message with the extra to install."""
    code = (
        "import sys, importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n in ('torch', 'vllm', 'nixl') else real(n, *a)\n"
        "from rdtplan.cli import main; main()"
    )
    arguments = [str(model), "-o", str(model / "p")] if command == "compile" else []
    done = subprocess.run([sys.executable, "-c", code, command, *arguments], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "RDT110" in done.stderr and "needs torch and vllm" in done.stderr and "pip install" in done.stderr


@pytest.mark.parametrize("command", ["inspect", "verify", "help"])
def test_looking_at_plans_imports_no_torch(command: str, tmp_path: Path) -> None:
    """`pip install rdtplan` alone must be enough, and `inspect` must be quick."""
    write_plan(make_plan(Scenario()), tmp_path / "p")
    code = (
        "import sys; from click.testing import CliRunner; from rdtplan.cli import main\n"
        "result = CliRunner().invoke(main, sys.argv[1:]); assert result.exit_code == 0, result.output\n"
        "print([m for m in ('torch', 'vllm', 'ray', 'nixl', 'numpy', 'transformers') if m in sys.modules])"
    )
    argument = "RDT301" if command == "help" else str(tmp_path / "p")
    shown = subprocess.run([sys.executable, "-c", code, command, argument], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_plan_modules_import_no_torch() -> None:
    """The rule of dependencies: everything that handles plans as data does without torch and without the runtime."""
    code = (
        "import sys, pkgutil, importlib\n"
        "import rdtplan.ir, rdtplan.passes, rdtplan.verify, rdtplan.inputs, rdtplan.report\n"
        "for p in (rdtplan.ir, rdtplan.passes, rdtplan.verify, rdtplan.inputs, rdtplan.report):\n"
        "    for m in pkgutil.iter_modules(p.__path__): importlib.import_module(p.__name__ + '.' + m.name)\n"
        "import rdtplan.compiler, rdtplan.cli, rdtplan.codes\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'vllm', 'ray', 'nixl', 'rdtexec')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_schema_file_is_generated_from_the_classes() -> None:
    """Whoever changes a class regenerates the schema: rdtplan schema > schemas/fleet-plan.schema.json."""
    assert json.loads((ROOT / "schemas" / "fleet-plan.schema.json").read_text()) == plan_schema()


def test_plans_conform_to_the_schema(tmp_path: Path) -> None:
    """The seal's root and every part, each against the class it is read as."""
    schema = plan_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    write_plan(make_plan(Scenario()), tmp_path / "p")
    seal, *parts = [orjson.loads(line) for line in (tmp_path / "p").read_bytes().splitlines()]
    jsonschema.validate(seal["plan"], schema)
    kinds = {"manifest": "Manifest", "program": "Program", "keys": "Keys", "chunks": "Chunks", "routing": "Routing"}
    checked = 0
    for entry, part in zip(seal["parts"], parts, strict=True):
        if entry["kind"] in kinds:
            jsonschema.validate(part, {"$ref": f"#/$defs/{kinds[entry['kind']]}", "$defs": schema["$defs"]})
            checked += 1
    assert checked >= len(kinds)


def test_findings_page_lists_every_code() -> None:
    """Regenerate with: python tools/findings.py > docs/findings.md"""
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "findings.py"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert (ROOT / "docs" / "findings.md").read_text() == made.stdout
