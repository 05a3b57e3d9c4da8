"""What the inspection commands say of synthetic plans: right, foldable, and never wider than the terminal."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from click import unstyle
from click.testing import CliRunner, Result
from forgery import with_digests
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import Scenario, Sizes, View, make_plan, scenarios

import rdtplan
from rdtplan.cli import main
from rdtplan.ir.file import PlanFile, write_plan
from rdtplan.ir.plan import FleetPlan, Waiver
from rdtplan.ir.topology import InferenceTopology, TransferSettings
from rdtplan.ir.view import PlanInMemory
from rdtplan.report import drill, inspect, memory
from rdtplan.report import explain as explaining
from rdtplan.report.boxes import box_of, region_text
from rdtplan.report.compare import compare
from rdtplan.report.diff import headline, render
from rdtplan.report.names import fold_names, indices, names_text, template
from rdtplan.report.tables import table
from rdtplan.report.units import human_bytes, human_seconds, parse_rate, parse_seconds, ranges
from rdtplan.report.writes import Write, describe, progression

ROOT = Path(__file__).resolve().parents[1]
SIZES = Sizes(layers=3, dense_layers=1, experts=4, heads=8, kv_heads=4, head_dim=2, intermediate=8, vocab=16)
BASE = Scenario(sizes=SIZES, topology=InferenceTopology(tensor_parallel=4, replicas=2), trainer_ranks=4)


@pytest.fixture(scope="module")
def plan() -> FleetPlan:
    return make_plan(BASE)


@pytest.fixture(scope="module")
def path(plan: FleetPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("report") / "fleet.plan"
    write_plan(plan, target)
    return target


def run(*args: str | Path, columns: int | None = None) -> Result:
    environment = {"COLUMNS": str(columns)} if columns else {}
    return CliRunner(env=environment).invoke(main, [str(a) for a in args])


COMMANDS: list[list[str]] = [
    ["inspect"],
    ["inspect", "--worker", "5"],
    ["inspect", "--producer", "2"],
    ["inspect", "--group", "model.layers.1"],
    ["inspect", "--chunk", "2", "--worker", "1"],
    ["mem"],
    ["explain", "model.layers.2.mlp.experts.3.up_proj.weight"],
    ["explain", "*.k_proj.*"],
    ["explain", "model.layers.1.mlp.experts.w13_weight"],
    ["simulate", "--bandwidth", "1GB/s", "--gather-time", "1us"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("columns", [40, 80, 160])
def test_nothing_is_wider_than_the_terminal(path: Path, command: list[str], columns: int) -> None:
    """Numbers are never cut: a column that does not fit is left out, and a line says so."""
    shown = run(command[0], path, *command[1:], columns=columns)
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.output.splitlines())) <= columns, shown.output
    assert "\x1b" not in shown.output and "…" not in shown.output


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_json_and_text_come_from_the_same_data(path: Path, command: list[str]) -> None:
    shown = run(command[0], path, *command[1:], "--json")
    assert shown.exit_code == 0 and json.loads(shown.output)


def test_a_pipe_gets_plain_text_with_every_column(path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "rdtplan.cli", "inspect", str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    assert "\x1b" not in shown and "params" in shown and "not shown" not in shown


@pytest.mark.parametrize("command", [*COMMANDS, ["diff"], ["verify"], ["report"]], ids=" ".join)
def test_looking_at_plans_imports_neither_torch_nor_vllm(path: Path, command: list[str], tmp_path: Path) -> None:
    arguments = [str(path), *command[1:]]
    if command[0] == "diff":
        arguments.append(str(path))
    if command[0] == "report":
        arguments += ["-o", str(tmp_path / "r.html")]
    code = (
        "import sys; from click.testing import CliRunner; from rdtplan.cli import main\n"
        "result = CliRunner().invoke(main, sys.argv[1:]); assert result.exit_code == 0, result.output\n"
        "print([m for m in ('torch', 'vllm', 'ray', 'nixl', 'numpy', 'transformers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, command[0], *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done


# -- numbers, names, regions -------------------------------------------------------------------------------------


def test_numbers_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 150 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "150 MiB",
        "3.0 TiB",
    ]
    assert [human_seconds(s) for s in (0, 2e-5, 0.0123, 1.5, 250.0)] == ["0 s", "20.0 us", "12.3 ms", "1.50 s", "250 s"]
    assert ranges([3, 1, 2, 7]) == "1-3, 7" and ranges([]) == ""
    assert parse_rate("400Gb/s", "") == parse_rate("50", "") == parse_rate("50e0 GB/s", "") == 50e9
    assert parse_seconds("2.5ms", "") == 0.0025
    for text in ("", "fast", "-1GB/s", "0", "1XB/s", "inf"):
        with pytest.raises(Exception, match="expected a rate"):
            parse_rate(text, "--bandwidth")
    for text in ("", "soon", "-1s", "1h"):
        with pytest.raises(Exception, match="expected a time"):
            parse_seconds(text, "--latency")


def test_tables_leave_columns_out_rather_than_cut_numbers() -> None:
    rows = [["model.layers.0.self_attn.q_proj.weight", "1,234,567", "89 GiB"]]
    wide = [unstyle(x) for x in table("", ["name", "count", "bytes"], rows, 100)]
    assert wide[1].split() == ["model.layers.0.self_attn.q_proj.weight", "1,234,567", "89", "GiB"]
    folded = [unstyle(x) for x in table("", ["name", "count", "bytes"], rows, 40)]
    assert "1,234,567" in folded[1] and "89 GiB" in folded[1] and len(folded) > 2
    narrow = "\n".join(unstyle(x) for x in table("", ["name", "count", "bytes"], rows, 30))
    assert "1,234,567" in narrow and "not shown at this width: bytes" in narrow.replace("\n", " ")


def test_names_fold_over_layers_and_experts() -> None:
    names = [f"m.layers.{a}.experts.{b}.w{c}.weight" for a in range(3) for b in (0, 1, 5) for c in (1, 2)]
    assert [(f.pattern, f.count) for f in fold_names(names)] == [
        ("m.layers.{0-2}.experts.{0-1, 5}.w1.weight", 9),
        ("m.layers.{0-2}.experts.{0-1, 5}.w2.weight", 9),
    ]


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2)), min_size=1))
def test_a_folded_name_claims_no_other_name(members: set[tuple[int, ...]]) -> None:
    """All patterns written out are the names, each once."""
    names = [f"m.{a}.e.{b}.w{c}.{c}" for a, b, c in members]
    folded = fold_names(names)
    made = [n for f in folded for n in written_out(f.pattern)]
    assert sorted(made) == sorted(names) and [f.count for f in folded] == [len(written_out(f.pattern)) for f in folded]


def written_out(pattern: str) -> list[str]:
    """The names that a pattern stands for."""
    found = re.search(r"\{(.*?)\}", pattern)
    if found is None:
        return [pattern]
    runs = found[1].split(", ")
    if "..." in found[1]:
        first, second, last = int(runs[0]), int(runs[1]), int(runs[2].removeprefix("... "))
        numbers = list(range(first, last + 1, second - first))
    else:
        numbers = [n for run in runs for a, _, b in [run.partition("-")] for n in range(int(a), int(b or a) + 1)]
    return [n for k in numbers for n in written_out(pattern[: found.start()] + str(k) + pattern[found.end() :])]


def test_a_pattern_in_many_pieces_is_cut_in_text_alone() -> None:
    names = [f"m.{k * k}.w" for k in range(20)]
    (folded,) = fold_names(names)
    assert written_out(folded.pattern) == names
    assert names_text(names) == "m.{0-1, 4, 9, 16, ... 361}.w"


@given(st.data())
def test_every_slice_of_a_tensor_is_named_as_a_slice(data: st.DataObject) -> None:
    """Any box of any dense tensor, in any order of dimensions, is found again from its region alone."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    view = View.full(shape)
    starts, lengths = [], []
    for d, n in enumerate(shape):
        start = data.draw(st.integers(0, n - 1))
        length = data.draw(st.integers(1, n - start))
        view = view.narrow(d, start, length)
        starts.append(start)
        lengths.append(length)
    box = box_of(view.region, shape, View.full(shape).stride)
    assert box is not None
    assert (box.starts, box.lengths) == (tuple(starts), tuple(lengths)), region_text(
        view.region, shape, View.full(shape).stride
    )


def test_regions_that_are_no_slices_are_written_out() -> None:
    full = View.full((4, 6))
    assert region_text(full.t().region, (4, 6), (6, 1)) == "[:, :] transposed [1, 0]"
    assert region_text(full.t().region, (6, 4), (1, 6)) == "[:, :]"
    assert region_text(full.select(0, 2).region, (4, 6), (6, 1)) == "[2, :]"
    diagonal = View((4,), (7,), 0)
    assert region_text(diagonal.region, (4, 6), (6, 1)).startswith("[shape (4,)")
    assert region_text(View((), (), 0).region, (), ()) == "[]"


def test_progressions_are_exact() -> None:
    assert progression(["[0:2, :]", "[2:4, :]", "[4:6, :]"], "i") == "[2i:2i+2, :]"
    assert progression(["a 5", "a 6"], "j") == "a j+5"
    assert progression(["a 0", "a 1", "a 3"], "i") is None
    assert progression(["a 3", "a 1"], "i") is None
    assert progression(["a 0", "b 1"], "i") is None


# -- inspect -----------------------------------------------------------------------------------------------------


def test_the_overview_adds_up(plan: FleetPlan, path: Path) -> None:
    with PlanFile(path) as file:
        s = inspect.summarize(file)
    assert s["traffic"]["nbytes"] == sum(sum(c.program.chunks.nbytes) for c in plan.consumers)
    assert s["traffic"]["broadcast_nbytes"] == len(plan.consumers) * s["model"]["nbytes"]
    assert s["chunks"]["count"] == s["traffic"]["pulls"] == sum(b["chunks"] for b in s["chunks"]["buckets"])
    assert sum(b["nbytes"] for b in s["chunks"]["buckets"]) == s["traffic"]["nbytes"]
    assert sum(r["nbytes"] for r in s["trainer_ranks"]) == s["traffic"]["nbytes"]
    assert abs(sum(r["of_mean"] for r in s["trainer_ranks"]) - len(s["trainer_ranks"])) < 1e-9
    text = "\n".join(inspect.render_summary(s, 100))
    assert "0-3" not in text or "TP4" in text


def test_the_overview_reads_no_slice_tables(path: Path, plan: FleetPlan) -> None:
    """Everything but the seal and the chunk tables may be ruined."""
    lines = path.read_bytes().split(b"\n")
    seal = json.loads(lines[0])
    for k, entry in enumerate(seal["parts"]):
        if entry["kind"] not in ("chunks", "program", "consumers"):
            lines[1 + k] = b"#" * len(lines[1 + k])
    ruined = path.parent / "ruined.plan"
    ruined.write_bytes(b"\n".join(lines))
    assert run("inspect", ruined).exit_code == 0
    assert run("inspect", ruined, "--worker", "0").exit_code == 1


def test_drill_downs_agree_with_the_plan(plan: FleetPlan, path: Path) -> None:
    with PlanFile(path) as file:
        for c in plan.consumers:
            w = drill.worker(file, c.consumer_id)
            assert w["nbytes"] == sum(p["nbytes"] for p in w["producers"]) == sum(x["nbytes"] for x in w["chunks"])
            assert w["position"] == str(c.position) and c.consumer_id in w["runs_the_program_of"]
            assert len(w["runs_the_program_of"]) == 2
        for p in plan.producers:
            shown = drill.producer(file, p.rank)
            assert shown["served_nbytes"] == plan.overview.served_nbytes[p.rank]
            assert shown["owned_nbytes"] == sum(p.group_nbytes)
        for k, g in enumerate(plan.groups):
            by_label, by_number = drill.group(file, g.label), drill.group(file, str(k))
            assert by_label == by_number and by_label["names"] == g.count
            assert sum(n["count"] for o in by_label["owners"] for n in o["names"]) == g.count
        chunks = plan.consumers[1].program.chunks
        for k in range(len(chunks)):
            c = drill.chunk(file, 1, k)
            assert c["nbytes"] == chunks.nbytes[k]
            scatters = chunks.scatter_end[k] - (chunks.scatter_end[k - 1] if k else 0)
            assert sum(w["count"] for w in c["writes"]) == scatters


def test_what_no_loader_writes_is_not_counted_among_the_parameters(plan: FleetPlan, path: Path) -> None:
    """Such names may or may not stand in the table of parameters."""
    program = plan.consumers[0].program
    assert not set(program.untouched) & set(program.parameters.names)
    shown = run("inspect", path, "--worker", "0").output
    assert "1 name that no loader writes" in shown and "of them" not in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--worker", "8"], "--worker 8: the plan has workers 0 to 7"),
        (["--worker", "-1"], "--worker -1: the plan has workers 0 to 7"),
        (["--worker", "8", "--chunk", "0"], "--worker 8: the plan has workers 0 to 7"),
        (["--producer", "4"], "--producer 4: the plan has trainer ranks 0 to 3"),
        (["--group", "foo"], "groups 0 to 4, such as 'model.layers.1'"),
        (["--group", "foo"], "that `rdtplan inspect --producer 0` shows"),
        (["--group", "model.layer.2"], "labels like it: model.layers.2"),
        (["--chunk", "99"], "worker 0 has chunks 0 to"),
        (["--worker", "0", "--producer", "0"], "--worker and --producer do not go together"),
        (["--group", "0", "--chunk", "0"], "--group and --chunk do not go together"),
    ],
)
def test_what_is_not_there_is_refused(path: Path, arguments: list[str], words: str) -> None:
    shown = run("inspect", path, *arguments)
    assert shown.exit_code == 1 and words in shown.output and "Traceback" not in shown.output


def test_memory_adds_up(plan: FleetPlan, path: Path) -> None:
    with PlanFile(path) as file:
        m = memory.forecast(file)
    assert [w["receive_pool_nbytes"] for w in m["workers"]] == list(plan.memory.receive_pool_nbytes)
    for w in m["workers"]:
        assert w["slots"] * m["receive_slot_nbytes"] == w["receive_pool_nbytes"]
    for r in m["trainer_ranks"]:
        assert r["together_nbytes"] == r["serve_ring_nbytes"] + r["resident_gather_nbytes"]
    assert m["largest_chunk"]["nbytes"] == max(n for c in plan.consumers for n in c.program.chunks.nbytes)


# -- explain -----------------------------------------------------------------------------------------------------


def test_a_weight_is_followed_to_every_worker(path: Path) -> None:
    """TP4 takes a quarter of the rows each; both replicas fold into one line."""
    with PlanFile(path) as file:
        (e,) = explaining.explain(file, "model.layers.2.mlp.experts.3.up_proj.weight")
    (line,) = e.writes
    assert line.workers == tuple(range(8)) and e.owners == (0, 1, 2, 3) and e.group == "model.layers.2"
    assert line.slice == "[2i:2i+2, :]" or line.slice.count("i") == 2, line
    assert line.destination == "[3, 2:4, :]" and line.parameter == "model.layers.2.mlp.experts.w13_weight"


def test_a_parameter_is_followed_back(path: Path) -> None:
    with PlanFile(path) as file:
        (e,) = explaining.explain(file, "model.layers.2.mlp.experts.w13_weight")
    assert e.direction == "parameter" and {len(w.sources) for w in e.writes} == {4}
    assert sorted(w.destination for w in e.writes) == ["[j, 0:2, :]", "[j, 2:4, :]"]


def test_names_that_travel_alike_are_explained_once(path: Path) -> None:
    with PlanFile(path) as file:
        found = explaining.explain(file, "*.gate_proj.weight")
        assert [len(e.like_it) for e in found] == [1, 8]
        everything = explaining.explain(file, "*")
        assert sum(len(e.like_it) for e in everything) == len(file.field("manifest"))
        parameters = explaining.explain(file, "*", parameters=True)
        assert sum(len(e.like_it) for e in parameters) == len(file.consumer(0).program.parameters)


def test_expert_parallel_experts_are_told_apart(tmp_path: Path) -> None:
    """Experts live on one worker each; names of one form that go to different workers are not one line."""
    write_plan(make_plan(evolve(BASE, topology=InferenceTopology(4, expert_parallel=True))), tmp_path / "p")
    with PlanFile(tmp_path / "p") as file:
        found = explaining.explain(file, "*.experts.*.up_proj.weight")
    assert sorted(e.workers for e in found) == [(0,), (1,), (2,), (3,)]


@pytest.fixture(scope="module")
def redundant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two workers of 6 slots: experts 4 to 7 have two each, 6 and 7 both on worker 1."""
    plan = rdtplan.place_experts(ROOT / "tests" / "golden" / "1.0-redundant.plan", (*range(8), 7, 6, 5, 4))
    target = tmp_path_factory.mktemp("redundant") / "p"
    write_plan(plan, target)
    return target


def test_two_slots_of_one_worker_are_two_lines(redundant: Path) -> None:
    """A letter counts workers, so a line has no worker twice."""
    with PlanFile(redundant) as file:
        (e,) = explaining.explain(file, "model.layers.1.mlp.experts.6.down_proj.weight")
        (parameter,) = explaining.explain(file, "model.layers.1.mlp.experts.w2_weight")
        chunk = drill.chunk(file, 1, 2)
    assert [(w.workers, w.destination, w.i) for w in e.writes] == [((1,), "[0, :, :]", 1), ((1,), "[3, :, :]", 1)]
    for line in parameter.writes:
        assert line.i == 1 or len(line.workers) > 1
        assert line.j == 1 or len(line.sources) > 1
    assert sum(w.nbytes for w in parameter.writes) == 12 * 128
    assert "i" not in "".join(w["destination"] for w in chunk["writes"])
    assert "counts" not in run("explain", redundant, e.name).output


def test_names_that_land_elsewhere_do_not_travel_alike(redundant: Path) -> None:
    """What is said of the first name of a form holds for all: its place, or one slot further for each."""
    with PlanFile(redundant) as file:
        found = explaining.explain(file, "*.down_proj.weight")
        places = {
            name: sorted((w.worker, w.destination) for w in writes)
            for name, writes in writes_by_name(file, "*.experts.*.down_proj.weight").items()
        }
    experts = [e for e in found if ".experts." in e.name]
    assert sorted(len(e.like_it) for e in experts) == [2, 2, 2, 2, 8], "both layers; experts 0 to 3 one slot further"
    for e in experts:
        by_layer: dict[str, list[str]] = {}
        for name in e.like_it:
            by_layer.setdefault(name.split(".experts.")[0], []).append(name)
        for names in by_layer.values():
            assert e.slots == (len(names) > 1)
            for k, name in enumerate(names):
                first = places[e.name]
                assert places[name] == [(w, d.replace(d[1], str(int(d[1]) + k), 1)) for w, d in first]
    shown = run("explain", redundant, "*.experts.*.down_proj.weight").output
    assert "and 7 names that travel as it does, each one slot further" in shown
    assert "and 1 name that travels as it does: model.layers.{1-2}.mlp.experts.6.down_proj.weight" in shown


def writes_by_name(file: PlanFile, pattern: str) -> dict[str, list[Write]]:
    """Every write of the sources that match, as it is."""
    manifest, found = file.field("manifest"), {}
    for c in drill.workers_of(file):
        for w in describe(c, manifest, range(len(c.program.scatters))):
            if fnmatchcase(w.source, pattern):
                found.setdefault(w.source, []).append(w)
    return found


LETTERS = re.compile(r"(?<![a-z])\d*[ij](?:\+\d*[ij])?(?:\+\d+)?(?![a-z])")


def said(text: str, i: int, j: int) -> str:
    """An index expression with its letters filled in."""

    def number(found: re.Match[str]) -> str:
        values = {"i": i, "j": j}
        terms = [(t[:-1] or "1", values[t[-1]]) if t[-1] in values else (t, 1) for t in found[0].split("+")]
        return str(sum(int(factor) * value for factor, value in terms))

    return LETTERS.sub(number, text)


def check_forms(file: PlanFile) -> None:
    """What is said of every form holds for every name of it, written out."""
    actual = writes_by_name(file, "*")
    for e in explaining.explain(file, "*"):
        last: dict[str, int] = {}
        for name in e.like_it:
            mine = actual.get(name, [])
            assert tuple(sorted({w.worker for w in mine})) == e.workers
            step = last[mine[0].parameter] = last.get(mine[0].parameter, -1) + 1 if mine else 0
            assert e.slots or not step
            shown = set()
            for line in e.writes:
                assert line.i <= len(line.workers) and line.j == 1
                parts = len(line.workers) == line.i
                for i in range(line.i):
                    slice_, place = (said(text, i, 0) for text in (line.slice, line.destination))
                    first, rest = re.fullmatch(r"\[(\d*)(.*)", place).groups()  # type: ignore[union-attr]
                    place = f"[{int(first) + step}{rest}" if step else place
                    shown.add((line.workers[i] if parts else None, slice_, place))
            for w in mine:
                assert {(w.worker, w.slice, w.destination), (None, w.slice, w.destination)} & shown, (e, name, w)
                assert template(w.parameter) in {template(x.parameter) for x in e.writes}
            assert {x[1:] for x in shown} == {(w.slice, w.destination) for w in mine}, (e, name)
    for e in explaining.explain(file, "*", parameters=True):
        mine = [w for writes in actual.values() for w in writes if w.parameter == e.name]
        shown = {
            (source, said(line.slice, i, j), said(line.destination, i, j))
            for line in e.writes
            for j, source in enumerate(sorted(line.sources, key=indices))
            for i in range(line.i)
        }
        assert shown == {(w.source, w.slice, w.destination) for w in mine}, e


@settings(max_examples=25)
@given(scenarios())
def test_what_is_said_of_a_form_holds_for_every_name(s: Scenario) -> None:
    check_forms(PlanInMemory(make_plan(s)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["1.0-redundant", "1.0-experts", "1.0-replicas"])
def test_what_is_said_of_the_golden_plans_holds(name: str, redundant: Path) -> None:
    with PlanFile(ROOT / "tests" / "golden" / f"{name}.plan") as file:
        check_forms(file)
    with PlanFile(redundant) as file:
        check_forms(file)


def test_layers_with_another_placement_are_explained_apart(tmp_path: Path) -> None:
    """Parameters too: of another layer's sources, or of the same in other slots."""
    golden = ROOT / "tests" / "golden" / "1.0-redundant.plan"
    start = (0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 7)
    layers = ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    moved = [start, (1, 0, *start[2:])]
    write_plan(rdtplan.place_experts(golden, start), tmp_path / "same")
    write_plan(rdtplan.place_experts(golden, dict(zip(layers, moved, strict=True))), tmp_path / "apart")
    for name, forms in (("same", [2]), ("apart", [1, 1])):
        with PlanFile(tmp_path / name) as file:
            found = explaining.explain(file, "*.w2_weight")
            assert [len(e.like_it) for e in found] == forms, name


def test_a_line_names_the_ranks_of_all_its_names(tmp_path: Path) -> None:
    """Chunks of the same worker come from several ranks, names of one form with them."""
    plan = make_plan(evolve(BASE, settings=TransferSettings(max_chunk_bytes=64), ownership="pipeline", seed=1))
    write_plan(plan, tmp_path / "p")
    with PlanFile(tmp_path / "p") as file:
        for e in explaining.explain(file, "*"):
            ranks = {
                (w.worker, w.producer) for writes in map(writes_by_name(file, "*").get, e.like_it) for w in writes or ()
            }
            for line in e.writes:
                assert set(line.producers) == {r for w, r in ranks if w in line.workers}


def test_replicas_count_as_one_worker(path: Path) -> None:
    shown = run("explain", path, "model.layers.2.mlp.experts.3.up_proj.weight").output
    assert "i counts the workers of a line from 0, those that do the same as one" in shown


def test_an_unknown_name_gets_suggestions(path: Path) -> None:
    shown = run("explain", path, "model.layers.2.mlp.experts.3.upp_proj.weight")
    assert shown.exit_code == 1 and "RDT108" in shown.output and "up_proj" in shown.output


def test_a_source_name_is_not_denied(path: Path) -> None:
    shown = run("explain", path, "model.layers.2.mlp.experts.3.up_proj.weight", "--parameter")
    assert shown.exit_code == 1 and "is a source name" in shown.output and "leave --parameter out" in shown.output


def test_fills_and_aliases_are_told(tmp_path: Path) -> None:
    sizes = evolve(SIZES, vocab=13, vocab_padding=4, tied=True)
    write_plan(make_plan(Scenario(sizes=sizes)), tmp_path / "p")
    shown = run("explain", tmp_path / "p", "model.embed_tokens.weight", "--parameter")
    assert shown.exit_code == 0 and "fills part of it with 0" in shown.output
    assert "also known as lm_head.weight" in shown.output, shown.output


# -- diff --------------------------------------------------------------------------------------------------------


def compared(a: FleetPlan, b: FleetPlan) -> Any:
    return compare(PlanInMemory(a), PlanInMemory(b))


CAUSES: list[tuple[Any, str]] = [
    (evolve(BASE, topology=InferenceTopology(2, replicas=2)), "TP 4 -> 2"),
    (evolve(BASE, topology=InferenceTopology(4)), "replicas 2 -> 1"),
    (evolve(BASE, topology=InferenceTopology(4, expert_parallel=True, replicas=2)), "EP off -> on"),
    (evolve(BASE, trainer_ranks=8), "trainer ranks 4 -> 8"),
    (evolve(BASE, ownership="pipeline", seed=1), "trainer ranks own other names"),
    (evolve(BASE, settings=TransferSettings(num_rdt_buffers=3)), "num_rdt_buffers (K) 2 -> 3"),
    (evolve(BASE, settings=TransferSettings(max_chunk_bytes=256)), "max_chunk_bytes 0 -> 256"),
    (evolve(BASE, sizes=evolve(SIZES, experts=8)), "manifest of"),
    (evolve(BASE, sizes=evolve(SIZES, hidden=16)), "another manifest"),
]


@pytest.mark.parametrize(("other", "cause"), CAUSES, ids=[c for _, c in CAUSES])
def test_the_first_line_names_the_cause(plan: FleetPlan, other: Scenario, cause: str) -> None:
    found = compared(plan, make_plan(other))
    lines = [unstyle(x) for x in render(found, 120)]
    assert not found.same and cause in lines[0], lines[0]
    assert len(lines) < 64 and max(map(len, lines)) <= 120


def test_another_vllm_that_only_respells_its_loaders_changes_no_plan(plan: FleetPlan) -> None:
    respelled = evolve(
        plan,
        compiler=evolve(plan.compiler, vllm="0.33.0"),
        consumers=tuple(
            evolve(
                c, program=evolve(c.program, provenance=evolve(c.program.provenance, loaders=("other (new.py:1)",) * 9))
            )
            for c in plan.consumers
        ),
    )
    found = compared(plan, respelled)
    assert found.same and "vllm 0.32.0 -> 0.33.0" in headline(found)
    assert any(e.after == "other (new.py:1)" for e in found.effects)


def test_a_loader_that_only_moved_in_its_file_is_one_line(plan: FleetPlan) -> None:
    def with_lines(*lines: int) -> FleetPlan:
        loaders = tuple(f"load (model.py:{line})" for line in lines)
        return evolve(
            plan,
            consumers=tuple(
                evolve(c, program=evolve(c.program, provenance=evolve(c.program.provenance, loaders=loaders)))
                for c in plan.consumers
            ),
        )

    found = compared(with_lines(1, 5, 5, 5, 5, 5, 5, 5, 5), with_lines(1, 7, 7, 7, 7, 7, 7, 7, 7))
    moved = [e for e in found.effects if e.kind in ("loader", "moved")]
    assert [(e.kind, e.names, e.before, e.after) for e in moved] == [("moved", "load (model.py)", "1, 5", "1, 7")]


def test_a_new_loader_under_the_same_inputs_is_said_to_be_one(plan: FleetPlan) -> None:
    c = plan.consumers[0]
    moved = evolve(
        c.program,
        scatters=evolve(c.program.scatters, region=c.program.scatters.region[:1] + c.program.scatters.region[1:]),
    )
    regions = list(moved.regions)
    regions[0] = evolve(regions[0], offset=regions[0].offset + 1)
    moved = evolve(moved, regions=tuple(regions))
    other = with_digests(
        evolve(plan, consumers=tuple(evolve(x, program=moved) if x.program is c.program else x for x in plan.consumers))
    )
    found = compared(plan, other)
    assert not found.same and "no input differs" in headline(found)
    assert any(e.kind.startswith("writes of worker") for e in found.effects), found.effects


def test_a_forged_plan_is_not_called_the_same(plan: FleetPlan, path: Path, tmp_path: Path) -> None:
    """Its identity is that of the other as it was written, and what the identity stands for is not."""
    other = evolve(plan.settings, num_rdt_buffers=3)
    for k, forged in enumerate((evolve(plan, manifest_digest="0" * 64), evolve(plan, settings=other))):
        write_plan(forged, tmp_path / str(k))
        shown = run("diff", path, tmp_path / str(k))
        assert shown.exit_code == 1 and "RDT330" in shown.output and "rdtplan verify" in shown.output, shown.output


@settings(max_examples=15)
@given(scenarios(), scenarios())
def test_any_two_plans_can_be_compared(a: Scenario, b: Scenario) -> None:
    x, y = make_plan(a), make_plan(b)
    found = compared(x, y)
    assert found.same == (x.identity == y.identity)
    assert found.same or found.causes or "no input differs" in headline(found)
    for width in (40, 120):
        assert max(len(unstyle(line)) for line in render(found, width)) <= width


def test_exit_codes_of_diff(path: Path, tmp_path: Path) -> None:
    write_plan(make_plan(evolve(BASE, trainer_ranks=2)), tmp_path / "other")
    assert run("diff", path, path).exit_code == 0
    differs = run("diff", path, tmp_path / "other")
    assert differs.exit_code == 2 and differs.output.splitlines()[0] == "different: trainer ranks 4 -> 2"
    for arguments in ([path], [path, tmp_path / "none"], [path, path, "--nonsense"], [path, ROOT / "README.md"]):
        assert run("diff", *arguments).exit_code == 1, arguments
    assert json.loads(run("diff", path, tmp_path / "other", "--json").output)["cause"] == "trainer ranks 4 -> 2"


def test_waivers_are_a_cause(plan: FleetPlan) -> None:
    found = compared(plan, with_digests(evolve(plan, waivers=(Waiver("RDT320", "*.x"),), identity="")))
    assert "waivers" in [c.field for c in found.causes]


def test_help_is_light() -> None:
    """`rdtplan --help` imports nothing but click: no JSON, no attrs, no plan."""
    code = (
        "import sys; from rdtplan.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('attrs', 'cattrs', 'orjson', 'rich', 'networkx', 'rdtplan.ir') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert shown.rstrip().endswith("[]") and re.search(r"simulate +Predict one sync", shown), shown


def test_one_thing_is_not_many(tmp_path: Path) -> None:
    write_plan(make_plan(Scenario(sizes=SIZES, topology=InferenceTopology(2))), tmp_path / "p")
    assert "2 workers, 1 trainer rank, " in run("verify", tmp_path / "p").output
    assert "held by trainer rank 0\n" in run("explain", tmp_path / "p", "lm_head.weight").output
    write_plan(make_plan(evolve(BASE, topology=InferenceTopology(2, replicas=2))), tmp_path / "q")
    assert "same program: worker 2\n" in run("inspect", tmp_path / "q", "--worker", "0").output


@pytest.mark.parametrize("module", ["boxes", "names", "units", "writes"])
def test_examples_in_docstrings_hold(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"rdtplan.report.{module}")).failed == 0


# -- the keys of --json --------------------------------------------------------------------------------------------

JSON_ROW = re.compile(r"^\| `(?P<command>[^`]*)` \| (?:`(?P<path>[^`]*)`)? ?\| (?P<keys>.*) \|$", re.MULTILINE)


def objects(value: Any, path: str = "") -> Iterator[tuple[str, frozenset[str]]]:
    """Every object in a JSON value: its path, with [] for the members of an array, and its keys."""
    if isinstance(value, list):
        for member in value:
            yield from objects(member, path + "[]")
    elif isinstance(value, dict):
        yield path, frozenset(value)
        for key, member in value.items():
            yield from objects(member, f"{path}.{key}" if path else key)


def test_the_page_names_every_key_of_json(redundant: Path, tmp_path: Path) -> None:
    """docs/json.md lists the objects that each command gives, and their keys; no more and no less."""
    records = [{"role": "consumer", "id": 0, "sync": 1, "seconds": 1.0, "chunks": [[0, 0.0, 0.1, 0.2, 0.3]]}]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "manifest.json").write_text(json.dumps([["other.weight", "bfloat16", [4]]]))
    other = ROOT / "tests" / "golden" / "1.0-replicas.plan"
    commands: dict[str, list[str | Path]] = {
        "inspect": [redundant],
        "inspect --worker": [redundant, "--worker", "0"],
        "inspect --producer": [redundant, "--producer", "0"],
        "inspect --group": [redundant, "--group", "1"],
        "inspect --chunk": [redundant, "--chunk", "1"],
        "mem": [redundant],
        "explain": [redundant, "*"],
        "diff": [redundant, other],
        "simulate": [redundant, "--actual", tmp_path / "run.jsonl"],
        "verify": [redundant, "--manifest", tmp_path / "manifest.json"],
    }
    given = {
        (name, path, keys)
        for name, arguments in commands.items()
        for path, keys in objects(json.loads(run(name.split()[0], *arguments, "--json").output))
    }
    listed = {
        (row["command"], row["path"] or "", frozenset(re.findall(r"`(\w+)`", row["keys"])))
        for row in JSON_ROW.finditer((ROOT / "docs" / "json.md").read_text())
    }
    assert given - listed == set(), "not in docs/json.md"
    assert listed - given == set(), "only in docs/json.md"
