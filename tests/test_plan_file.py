"""Plan files: what is written is what is read, and nothing else is ever accepted."""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from forgery import Parts, Seal, close_up, forge, open_up, part_index, with_digests, with_program
from hypothesis import given, settings
from plans import COMPILER, Scenario, make_plan, scenarios

from rdtplan.errors import PlanFormatError, RdtError
from rdtplan.ir.file import PlanFile, encode, write_plan
from rdtplan.ir.plan import FleetPlan, Serving, Waiver
from rdtplan.ir.regions import Region
from rdtplan.ir.topology import InferenceTopology, TransferSettings
from rdtplan.verify import verify_fleet
from rdtplan.verify.structure import check_manifest, check_worker

ROOT = Path(__file__).parent.parent
SCENARIO = Scenario(
    topology=InferenceTopology(tensor_parallel=2, replicas=2),
    settings=TransferSettings(max_chunk_bytes=256, stages_in_flight=2),
    trainer_ranks=4,
    ownership="pipeline",
    seed=1,
)


@pytest.fixture(scope="module")
def plan() -> FleetPlan:
    return make_plan(SCENARIO)


@pytest.fixture(scope="module")
def data(plan: FleetPlan) -> bytes:
    return encode(plan)[0]


@pytest.fixture
def path(tmp_path: Path, data: bytes) -> Path:
    target = tmp_path / "fleet.plan"
    target.write_bytes(data)
    return target


def refusal(path: Path, read: Callable[[PlanFile], object] = PlanFile.fleet) -> PlanFormatError:
    """The error that opening and reading a file ends with."""
    with pytest.raises(PlanFormatError) as caught, PlanFile(path) as file:
        read(file)
    assert str(path) in caught.value.message or path.name in caught.value.message
    assert caught.value.fix
    return caught.value


# -- round trip ----------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path, plan: FleetPlan) -> None:
    target = tmp_path / "fleet.plan"
    digest = write_plan(plan, target)
    with PlanFile(target) as file:
        assert file.digest == digest
        assert file.fleet() == plan
        assert file.field("manifest") == plan.manifest
        assert file.field("topology") == plan.topology
        assert file.field("groups") == plan.groups
        for consumer in plan.consumers:
            assert file.consumer(consumer.consumer_id) == consumer
        for producer in plan.producers:
            assert file.producer(producer.rank) == producer
    assert [p.name for p in tmp_path.iterdir()] == ["fleet.plan"]
    assert os.stat(target).st_mode & 0o777 == 0o644


@settings(max_examples=40)
@given(scenarios())
def test_every_plan_survives_the_round_trip(tmp_path_factory: pytest.TempPathFactory, s: Scenario) -> None:
    target = tmp_path_factory.getbasetemp() / "any.plan"
    plan = make_plan(s)
    digest = write_plan(plan, target)
    with PlanFile(target) as file:
        read = file.fleet()
        assert read == plan and file.digest == digest
    assert encode(read) == (target.read_bytes(), digest)
    assert verify_fleet(read) == []
    shared = {id(c.program) for c in read.consumers}
    assert len(shared) == len({c.program for c in plan.consumers})


def test_rare_values_survive_the_round_trip(tmp_path: Path, plan: FleetPlan) -> None:
    """Infinite fills, text in every script, a model with quantization, waivers and notes."""
    odd = with_program(plan, fills=lambda f: evolve(f, values=(float("inf"),) * len(f)))
    odd = evolve(
        odd,
        notes=("Größe ≤ 4 · 日本\u2028\n\0",),
        waivers=(Waiver("RDT320", "*.k_scale"),),
        model=evolve(plan.model, quantization="fp8"),
    )
    write_plan(odd, tmp_path / "odd.plan")
    with PlanFile(tmp_path / "odd.plan") as file:
        assert file.fleet() == odd


def test_an_int_where_a_float_belongs_changes_no_byte(plan: FleetPlan) -> None:
    as_int = evolve(plan, settings=evolve(plan.settings, buffer_presize_gb=0))
    assert as_int == plan and encode(as_int) == encode(plan)


def test_what_repeats_is_stored_once(plan: FleetPlan, data: bytes) -> None:
    kinds = [e["kind"] for e in open_up(data)[0]["parts"]]
    assert kinds.count("program") == 2 and kinds.count("routing") == 2 and kinds.count("consumers") == 4
    one = encode(make_plan(evolve(SCENARIO, topology=InferenceTopology(2, replicas=1))))[0]
    many = encode(make_plan(evolve(SCENARIO, topology=InferenceTopology(2, replicas=40))))[0]
    assert len(many) < 2.5 * len(one) + 78 * 1000


def test_the_same_plan_gives_the_same_bytes_anywhere(tmp_path: Path, data: bytes) -> None:
    assert encode(make_plan(SCENARIO))[0] == data
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import test_plan_file as t; from rdtplan.ir.file import encode\n"
        "import hashlib; print(hashlib.sha256(encode(t.make_plan(t.SCENARIO))[0]).hexdigest())"
    )
    for seed in ("1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(ROOT), str(ROOT / "tests")],
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": "Asia/Tokyo", "LC_ALL": "C"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == hashlib.sha256(data).hexdigest()


def test_a_plan_says_nothing_of_the_machine_that_compiled_it(data: bytes) -> None:
    for word in (str(ROOT), str(Path.home()), os.uname().nodename, "pickle"):
        assert word.encode() not in data


# -- damage --------------------------------------------------------------------------------------------------


def test_a_worker_loads_its_part_alone(path: Path, plan: FleetPlan, data: bytes) -> None:
    """Every part that consumer 0 does not need is ruined: its plan still loads, the others do not."""
    seal, parts = open_up(data)
    needed: set[int] = set()

    def reach(value: Any) -> None:
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            reach(item)
        if isinstance(value, dict) and "$part" in value and value["$part"] not in needed:
            needed.add(value["$part"])
            reach(parts[value["$part"]])

    reach(seal["plan"]["consumers"][0])
    lines = data.split(b"\n")
    for i in range(len(parts)):
        if i not in needed:
            lines[1 + i] = b"#" * len(lines[1 + i])
    path.write_bytes(b"\n".join(lines))
    with PlanFile(path) as file:
        assert file.consumer(0) == plan.consumers[0]
        assert file.consumer(0).program is file.consumer(0).program
        for other in (lambda f: f.consumer(1), lambda f: f.producer(0), lambda f: f.field("manifest")):
            assert refusal(path, other).code == "RDT405"
    assert refusal(path).code == "RDT405"


def test_a_truncated_file_is_refused_at_every_length(path: Path, data: bytes) -> None:
    end_of_seal = data.index(b"\n") + 1
    lengths = {0, 1, end_of_seal - 1, end_of_seal, end_of_seal + 1, len(data) - 1}
    lengths |= set(range(7, len(data), max(1, len(data) // 150)))
    for length in sorted(lengths):
        path.write_bytes(data[:length])
        error = refusal(path)
        if length:
            assert error.code == "RDT403" and "truncated" in error.message, (length, error)
        else:
            assert error.code == "RDT402" and "is empty" in error.message


def test_an_appended_file_is_refused(path: Path, data: bytes) -> None:
    for tail in (b"\n", b"{}", data):
        path.write_bytes(data + tail)
        assert refusal(path).code == "RDT405"


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        (rb'"num_rdt_buffers":2', rb'"num_rdt_buffers":3', "plan.settings"),
        (rb'"architecture":"S', rb'"architecture":"T', "plan.model"),
        (rb'"rdtplan":"0', rb'"rdtplan":"7', "plan.compiler"),
        (rb'"replicas":2', rb'"replicas":3', "plan.topology"),
        (rb'"format":"1.0"', rb'"format":"1.1"', "format"),
        (rb'"kind":"manifest"', rb'"kind":"manifesT"', "parts"),
        (rb'"digest":"..', rb'"digest":"zz', "digest"),
        (rb'"plan.memory":"..', rb'"plan.memory":"zz', "plan.memory"),
        (rb'"model.norm.weight"', rb'"model.norn.weight"', "manifest.names"),
        (rb'"class_of":\[0', rb'"class_of":[1', "ownership.class_of"),
        (rb'"consumer_id":0', rb'"consumer_id":1', "consumers.consumer_id"),
        (rb'"slot_nbytes":\d', rb'"slot_nbytes":9', "producers.servings"),
        (rb'"key_end":\[\d', rb'"key_end":[0', "chunks.key_end"),
        (rb'"label":"model', rb'"label":"Model', "groups"),
        (rb'"offset":0,"shape":\[', rb'"offset":9,"shape":[', "regions"),
    ],
)
def test_an_edit_is_refused_by_the_name_of_the_field(
    path: Path, data: bytes, old: bytes, new: bytes, field: str
) -> None:
    edited, n = re.subn(old, lambda _: new, data, count=1)
    assert n == 1 and len(edited) == len(data)
    path.write_bytes(edited)
    error = refusal(path)
    assert error.code == "RDT405"
    assert re.search(rf"(at {re.escape(field)}:|\({re.escape(field)}\) was edited)", error.message), error.message


def test_a_seal_that_is_spelled_otherwise_is_refused(path: Path, data: bytes) -> None:
    """The content is the same, the bytes are not: somebody opened the plan as text."""
    for spelled in (data.replace(b'{"digest"', b'{ "digest"', 1), data.replace(b"\n", b"\r\n", 1)):
        path.write_bytes(spelled)
        error = refusal(path)
        assert error.code == "RDT405" and "spelled anew" in error.message


def test_a_lost_line_end_between_parts_is_refused(path: Path, data: bytes) -> None:
    ends = [i for i, byte in enumerate(data) if byte == 0x0A]
    for at in (ends[1], ends[-1]):
        path.write_bytes(data[:at] + b" " + data[at + 1 :])
        assert refusal(path).code == "RDT405"


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, content, code in (
        ("empty", b"", "RDT402"),
        ("text", b"terraform {}\n", "RDT402"),
        ("binary", bytes(range(256)), "RDT402"),
        ("number", b"5\n", "RDT402"),
        ("other", b'{"kind": "rdtplan.manifest"}\n', "RDT402"),
        ("array", b"[]\n", "RDT402"),
        ("nested", b"[" * 100_000 + b"\n", "RDT402"),
    ):
        target = tmp_path / name
        target.write_bytes(content)
        assert refusal(target).code == code, name


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.plan").code == "RDT401"
    assert refusal(tmp_path).code == "RDT401"


def test_another_consumer_or_rank_is_refused(path: Path, data: bytes, tmp_path: Path) -> None:
    for read in (lambda f: f.consumer(4), lambda f: f.consumer(-1), lambda f: f.producer(4)):
        assert refusal(path, read).code == "RDT406"

    def swap(seal: Seal, _: Parts) -> None:
        for field in ("consumers", "producers"):
            seal["plan"][field][:2] = seal["plan"][field][1::-1]

    swapped = forge(data, tmp_path / "swapped.plan", swap)
    error = refusal(swapped, lambda f: f.consumer(1))
    assert error.code == "RDT404" and "consumers[1].consumer_id: expected 1, found 0" in error.message
    error = refusal(swapped, lambda f: f.producer(0))
    assert error.code == "RDT404" and "producers[0].rank: expected 0, found 1" in error.message


# -- versions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.0", "0.9", "10.0", "", None, 1, 1.0, ["1", "0"]])
def test_another_major_version_is_refused(path: Path, data: bytes, version: Any) -> None:
    forge(data, path, lambda seal, _: seal.update(format=version))
    error = refusal(path)
    assert error.code == "RDT408" and repr(version) in error.message and "1.x" in error.message


def test_a_newer_minor_version_loads(path: Path, data: bytes, plan: FleetPlan) -> None:
    """Fields that this version does not know are ignored, wherever they stand."""

    def future(seal: Seal, parts: Parts) -> None:
        seal.update(format="1.7", compression=None)
        seal["plan"]["policy"] = {"x": [1]}
        seal["plan"]["settings"]["rails"] = 8
        for entry, part in zip(seal["parts"], parts, strict=True):
            entry["codec"] = "json"
            if isinstance(part, dict):
                part["hints"] = [1, 2]
        parts[part_index(seal, "producers")]["servings"][0]["rail"] = 3

    forge(data, path, future)
    with PlanFile(path) as file:
        assert file.fleet() == plan
        assert file.consumer(2) == plan.consumers[2]


# -- sealed, but not a plan ----------------------------------------------------------------------------------

SHAPES: list[tuple[str, Callable[[Seal, Parts], object], str]] = [
    (
        "field of the plan",
        lambda s, p: s["plan"].pop("topology"),
        "plan.topology: required field is missing",
    ),
    ("nested field", lambda s, p: s["plan"]["compiler"].pop("vllm"), "plan.compiler.vllm: required"),
    (
        "field of a part",
        lambda s, p: p[part_index(s, "keys")].pop("offset"),
        "(keys).offset: required field is missing",
    ),
    ("no parts", lambda s, p: (s.pop("parts"), p.clear()), "parts: expected list, it is missing"),
    ("parts no list", lambda s, p: (s.update(parts={"0": 1}), p.clear()), "parts: expected list, found dict"),
    (
        "part no object",
        lambda s, p: s["parts"].insert(0, 5) or p.insert(0, {}),
        "parts[0].nbytes is not a size",
    ),
    ("plan no object", lambda s, p: s.update(plan=[]), "plan: expected dict, found list"),
    (
        "str for int",
        lambda s, p: s["plan"]["topology"].update(replicas="2"),
        "plan.topology.replicas: expected int, found str '2'",
    ),
    (
        "bool for int",
        lambda s, p: s["plan"]["topology"].update(replicas=True),
        "plan.topology.replicas: expected int, found bool",
    ),
    (
        "float for int",
        lambda s, p: s["plan"]["settings"].update(num_rdt_buffers=2.0),
        "plan.settings.num_rdt_buffers: expected int, found float",
    ),
    (
        "str for float",
        lambda s, p: s["plan"]["settings"].update(buffer_presize_gb="1"),
        "plan.settings.buffer_presize_gb: expected a number, found '1'",
    ),
    (
        "int for str",
        lambda s, p: s["plan"]["compiler"].update(vllm=32),
        "plan.compiler.vllm: expected str, found int",
    ),
    (
        "bad int in a column",
        lambda s, p: p[part_index(s, "keys")]["source"].__setitem__(3, "x"),
        "(keys).source: expected int at index 3, found 'x'",
    ),
    (
        "bad name in a column",
        lambda s, p: p[part_index(s, "manifest")]["names"].__setitem__(3, 7),
        "(manifest).names: expected an array of strings",
    ),
    (
        "column no array",
        lambda s, p: p[part_index(s, "chunks")].update(nbytes=5),
        "(chunks).nbytes: expected an array of ints, found int",
    ),
    (
        "nested path",
        lambda s, p: p[part_index(s, "regions")][2].update(offset="0"),
        "(regions)[2].offset: expected int",
    ),
    (
        "path through servings",
        lambda s, p: p[part_index(s, "producers")]["servings"][1].update(chunks=[None]),
        "(producers).servings[1].chunks: expected int at index 0",
    ),
    (
        "part of another type",
        lambda s, p: p.__setitem__(part_index(s, "keys"), []),
        "expected an object, found list",
    ),
    (
        "reference out of range",
        lambda s, p: s["plan"].update(manifest={"$part": 999}),
        "reference to part 999",
    ),
    ("reference negative", lambda s, p: s["plan"].update(manifest={"$part": -1}), "reference to part -1"),
    ("no reference", lambda s, p: s["plan"].update(manifest=3), "expected a reference to a part"),
    ("consumers no array", lambda s, p: s["plan"].update(consumers=3), "plan.consumers: expected an array"),
    (
        "reference to its own kind",
        lambda s, p: s["plan"]["consumers"].__setitem__(0, {"$part": 0}),
        "is missing",
    ),
]


@pytest.mark.parametrize(("edit", "words"), [x[1:] for x in SHAPES], ids=[x[0] for x in SHAPES])
def test_a_sealed_plan_of_another_shape_is_refused_with_the_path(
    path: Path, data: bytes, edit: Callable[[Seal, Parts], object], words: str
) -> None:
    forge(data, path, lambda seal, parts: (edit(seal, parts), None)[1])
    error = refusal(path)
    assert error.code == "RDT404" and words in error.message, error.message


@pytest.mark.parametrize(
    ("nbytes", "code"),
    [(1 << 60, "RDT403"), (-1, "RDT404"), (True, "RDT404"), (1.5, "RDT404"), (None, "RDT404"), (0, "RDT405")],
)
def test_a_sealed_size_that_is_not_there_costs_no_memory(path: Path, data: bytes, nbytes: Any, code: str) -> None:
    seal, parts = open_up(data)
    seal["parts"][-1]["nbytes"] = nbytes
    path.write_bytes(close_up(seal, parts, mend=False))
    assert refusal(path).code == code


def corruptions(data: bytes, count: int) -> Iterator[bytes]:
    """`count` seeded ways in which bytes go wrong on a disk or in an editor."""
    dice = random.Random(20260101)
    lines = data.split(b"\n")
    n = len(data)
    while count:
        kind, at = dice.randrange(9), dice.randrange(n)
        length = min(dice.choice((1, 1, 2, 8, 300)), n - at)
        if kind == 0:
            spoiled = data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]
        elif kind == 1:
            spoiled = data[:at] + data[at + length :]
        elif kind == 2:
            spoiled = data[:at] + dice.randbytes(length) + data[at:]
        elif kind == 3:
            spoiled = data[:at] + bytes(length) + data[at + length :]
        elif kind == 4:
            spoiled = data[:at] + dice.choice((b"0", b"9", b'"', b"}", b"]", b",", b"\n", b" ")) + data[at + 1 :]
        elif kind == 5:
            spoiled = data[:at]
        elif kind == 6:
            i, j = dice.randrange(len(lines)), dice.randrange(len(lines))
            swapped = list(lines)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            spoiled = b"\n".join(swapped)
        elif kind == 7:
            spoiled = re.sub(rb"\d", lambda m: bytes([48 + (m[0][0] - 47) % 10]), data[: at + 40][at:], count=1)
            spoiled = data[:at] + spoiled + data[at + 40 :]
        else:
            other = dice.randrange(n)
            spoiled = data[:at] + data[other : other + length] + data[at + length :]
        if spoiled != data:
            count -= 1
            yield spoiled


def test_no_random_corruption_is_accepted(path: Path, plan: FleetPlan, data: bytes) -> None:
    for spoiled in corruptions(data, 2000):
        path.write_bytes(spoiled)
        with pytest.raises(RdtError):
            with PlanFile(path) as file:
                file.fleet()
    for spoiled in corruptions(data, 150):
        path.write_bytes(spoiled)
        for consumer in plan.consumers:
            try:
                with PlanFile(path) as file:
                    assert file.consumer(consumer.consumer_id) == consumer
            except RdtError:
                continue


# -- writing -------------------------------------------------------------------------------------------------


def test_an_unwritable_place_is_named(tmp_path: Path, plan: FleetPlan) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    places = [tmp_path / "none" / "a.plan", tmp_path / "file" / "a.plan", tmp_path / "folder"]
    for place in [*places, Path("/proc/a.plan")]:
        with pytest.raises(PlanFormatError) as caught:
            write_plan(plan, place)
        assert caught.value.code == "RDT407" and str(place) in caught.value.message
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path, plan: FleetPlan) -> None:
    """A device or a pipe would become a plain file for the whole machine; a symbolic link stays one."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to("pipe")
    for name in ("pipe", "to_pipe"):
        with pytest.raises(PlanFormatError, match="a pipe") as caught:
            write_plan(plan, tmp_path / name)
        assert caught.value.code == "RDT407" and (tmp_path / name).is_fifo()
    (tmp_path / "deep").mkdir()
    (tmp_path / "link").symlink_to("deep/real")
    for _ in range(2):  # where the link leads nowhere yet, and where a file is
        write_plan(plan, tmp_path / "link")
        assert (tmp_path / "link").is_symlink() and PlanFile(tmp_path / "deep" / "real").fleet() == plan
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PlanFormatError):
        write_plan(plan, tmp_path / "loop")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "link", "loop", "pipe", "to_pipe"]


def test_a_full_disk_leaves_the_old_plan(tmp_path: Path, plan: FleetPlan) -> None:
    """The limit of a file's size stands for the end of the disk."""
    target = tmp_path / "fleet.plan"
    code = (
        "import resource, sys; sys.path[:0] = sys.argv[1:3]\n"
        "import test_plan_file as t\n"
        "plan = t.make_plan(t.SCENARIO)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: t.write_plan(plan, sys.argv[3])\n"
        "except t.PlanFormatError as error: print(error.code, error.message)"
    )
    for before in (None, "old"):
        if before:
            target.write_text(before)
        done = subprocess.run(
            [sys.executable, "-c", code, str(ROOT), str(ROOT / "tests"), str(target)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith("RDT407") and "File too large" in done.stdout, done
        assert [p.read_text() for p in tmp_path.iterdir()] == ([before] if before else [])


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, plan: FleetPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_plan(plan, tmp_path / "fleet.plan")
    assert list(tmp_path.iterdir()) == []


def test_a_new_plan_replaces_the_old_one(path: Path, plan: FleetPlan) -> None:
    newer = evolve(plan, compiler=evolve(COMPILER, rdtplan="9"))
    with PlanFile(path) as old:
        write_plan(newer, path)
        assert old.fleet() == plan
    with PlanFile(path) as new:
        assert new.fleet() == newer


# -- sealed, but impossible ----------------------------------------------------------------------------------


def put(column: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    out = list(column)
    out[at] = value(out[at]) if callable(value) else value
    return tuple(out)


def column(table: str, name: str, at: int, value: Any) -> Callable[[FleetPlan], FleetPlan]:
    """Change one entry of a column of the first program."""
    return lambda plan: with_program(plan, **{table: lambda t: evolve(t, **{name: put(getattr(t, name), at, value)})})


def shorter(table: str, name: str) -> Callable[[FleetPlan], FleetPlan]:
    return lambda plan: with_program(plan, **{table: lambda t: evolve(t, **{name: getattr(t, name)[:-1]})})


def region(at: int, **changes: Any) -> Callable[[FleetPlan], FleetPlan]:
    return lambda plan: with_program(plan, regions=lambda r: put(r, at, lambda x: evolve(x, **changes)))


def routing(name: str, value: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Callable[[FleetPlan], FleetPlan]:
    def change(plan: FleetPlan) -> FleetPlan:
        c = plan.consumers[0]
        new = evolve(c, routing=evolve(c.routing, **{name: value(getattr(c.routing, name))}))
        return evolve(plan, consumers=(new, *plan.consumers[1:]))

    return change


def producer(**changes: Any) -> Callable[[FleetPlan], FleetPlan]:
    def change(plan: FleetPlan) -> FleetPlan:
        p = plan.producers[0]
        values = {k: v(getattr(p, k)) if callable(v) else v for k, v in changes.items()}
        return evolve(plan, producers=(evolve(p, **values), *plan.producers[1:]))

    return change


def nested(field: str, **changes: Any) -> Callable[[FleetPlan], FleetPlan]:
    def change(plan: FleetPlan) -> FleetPlan:
        old = getattr(plan, field)
        values = {k: v(getattr(old, k)) if callable(v) else v for k, v in changes.items()}
        return evolve(plan, **{field: evolve(old, **values)})

    return change


Change = Callable[[FleetPlan], FleetPlan]
BIG = 10**9
P = "consumers[0].program."
HUGE = Region((1 << 40,), (1,), 0)

# What is tampered with, the code, and the field that is named.
WORKER_FAULTS: list[tuple[Change, str, str]] = [
    *(
        (column(table, name, 0, bad), "RDT330", f"{P}{table}.{name}")
        for table, names in (
            ("keys", ("source", "region", "dtype")),
            ("scatters", ("key", "parameter", "region")),
            ("provenance", ("scatter_loader", "scatter_chain")),
            ("chunks", ("group", "owner_class")),
            ("lifetimes", ("module", "first", "last")),
            ("parameters", ("modules",)),
        )
        for name in names
        for bad in (BIG, -1)
    ),
    *(
        (shorter(table, name), "RDT330", f"{P}{table}.")
        for table, name in (
            ("keys", "offset"),
            ("provenance", "scatter_chain"),
            ("chunks", "nbytes"),
            ("lifetimes", "last"),
            ("parameters", "aliases"),
            ("parameters", "strides"),
        )
    ),
    (column("keys", "offset", 1, lambda n: n + 1), "RDT330", f"{P}keys.offset[1]"),
    (
        lambda p: with_program(p, keys=lambda t: evolve(t, offset=(0,) * len(t))),
        "RDT330",
        f"{P}keys.offset[",
    ),
    (column("keys", "offset", 0, -16), "RDT330", f"{P}keys.offset[0]"),
    (column("chunks", "nbytes", 0, lambda n: n + 2), "RDT330", f"{P}chunks.nbytes[0]"),
    (column("chunks", "nbytes", 0, lambda n: n - 2), "RDT330", f"{P}chunks.nbytes[0]"),
    (column("chunks", "key_end", -1, lambda n: n - 1), "RDT330", f"{P}chunks.key_end"),
    (column("chunks", "key_end", 0, 0), "RDT330", f"{P}chunks.key_end"),
    (column("chunks", "scatter_end", 0, 0), "RDT330", f"{P}chunks.scatter_end"),
    (column("chunks", "stream", 0, lambda n: n + 1), "RDT330", f"{P}chunks.stream"),
    (column("chunks", "stream", 0, -1), "RDT330", f"{P}chunks.stream"),
    (column("chunks", "group", 1, 3), "RDT330", f"{P}chunks.group[1]"),
    (column("scatters", "key", 0, 2), "RDT330", f"{P}scatters.key"),
    (column("lifetimes", "first", 2, lambda n: n + 1), "RDT330", f"{P}lifetimes"),
    (column("lifetimes", "last", 2, lambda n: n - 1), "RDT330", f"{P}lifetimes"),
    (column("lifetimes", "module", 0, 1), "RDT330", f"{P}lifetimes"),
    (
        lambda p: with_program(
            p, lifetimes=lambda t: evolve(t, module=t.module[1:], first=t.first[1:], last=t.last[1:])
        ),
        "RDT330",
        f"{P}lifetimes",
    ),
    (
        lambda p: with_program(
            p,
            lifetimes=lambda t: evolve(
                t, module=t.module + t.module[:1], first=t.first + t.first[:1], last=t.last + t.last[:1]
            ),
        ),
        "RDT330",
        f"{P}lifetimes",
    ),
    (lambda p: with_program(p, free_after=lambda f: put(f, 1, -1)), "RDT330", f"{P}free_after"),
    (lambda p: with_program(p, free_after=lambda f: put(f, 1, f[1] - 1)), "RDT330", f"{P}free_after"),
    (lambda p: with_program(p, free_after=lambda f: put(f, 1, BIG)), "RDT330", f"{P}free_after"),
    (lambda p: with_program(p, free_after=lambda f: f[:-1]), "RDT330", f"{P}free_after"),
    (region(0, offset=-1), "RDT330", f"{P}regions[0]"),
    (region(0, stride=(-1,)), "RDT330", f"{P}regions[0]"),
    (region(0, stride=()), "RDT330", f"{P}regions[0]"),
    (region(0, shape=(4, 1), stride=(1, 1)), "RDT330", f"{P}regions[0]"),
    (region(0, offset=BIG), "RDT314", f"{P}keys.region[0]"),
    (region(0, shape=(1 << 40,)), "RDT314", f"{P}keys.region[0]"),
    (column("scatters", "region", 0, 1), "RDT330", f"{P}scatters.region[0]"),
    (
        lambda p: with_program(
            p,
            regions=lambda r: (*r, HUGE),
            scatters=lambda t: evolve(t, region=put(t.region, 0, len(p.consumers[0].program.regions))),
        ),
        "RDT313",
        f"{P}scatters.region[0]",
    ),
    (lambda p: with_program(p, dtype_table=("bfloat32", "float32")), "RDT330", f"{P}dtype_table"),
    (column("parameters", "dtypes", 0, "int3"), "RDT330", f"{P}dtype_table"),
    (column("parameters", "strides", 0, (1,)), "RDT330", f"{P}parameters.strides[0]"),
    (column("parameters", "shapes", 0, (-2, 8)), "RDT330", f"{P}parameters.strides[0]"),
    (column("parameters", "kinds", 0, "gradient"), "RDT330", f"{P}parameters.kinds[0]"),
    (
        lambda p: with_program(p, parameters=lambda t: evolve(t, names=put(t.names, 2, t.names[1]))),
        "RDT330",
        f"{P}parameters.names",
    ),
    (column("parameters", "module_names", 0, "model.lm_head"), "RDT330", f"{P}parameters.modules[0]"),
    (
        lambda p: with_program(
            p,
            fills=lambda f: evolve(f, parameters=(0,), regions=(0,), values=(0.0,), before=(2,)),
            provenance=lambda v: evolve(v, fill_loader=(0,)),
        ),
        "RDT330",
        f"{P}fills.before",
    ),
    (
        lambda p: with_program(
            p,
            regions=lambda r: (*r, HUGE),
            fills=lambda f: evolve(
                f,
                parameters=(0,),
                regions=(len(p.consumers[0].program.regions),),
                values=(0.0,),
                before=(1,),
            ),
            provenance=lambda v: evolve(v, fill_loader=(0,)),
        ),
        "RDT313",
        f"{P}fills.regions[0]",
    ),
    (routing("producer", lambda c: put(c, 0, 3)), "RDT330", "consumers[0].routing.producer[0]"),
    (routing("producer", lambda c: put(c, 0, BIG)), "RDT330", "consumers[0].routing.producer[0]"),
    (routing("producer", lambda c: c[:-1]), "RDT330", "consumers[0].routing"),
    (routing("seq", lambda c: put(c, 1, 7)), "RDT330", "consumers[0].routing.seq"),
    (routing("seq", lambda c: c[::-1]), "RDT330", "consumers[0].routing.seq"),
]

SHARED_FAULTS: list[tuple[Change, str, str]] = [
    (nested("ownership", class_of=lambda c: put(c, 0, BIG)), "RDT330", "plan.ownership.class_of"),
    (nested("ownership", class_of=lambda c: c[:-1]), "RDT330", "plan.ownership.class_of"),
    (nested("ownership", class_of=lambda c: put(c, 0, 1)), "RDT330", ""),
    (nested("ownership", classes=lambda c: put(c, 0, ())), "RDT330", "plan.ownership.classes[0]"),
    (nested("ownership", classes=lambda c: put(c, 0, (1, 0))), "RDT330", "plan.ownership.classes[0]"),
    (nested("ownership", classes=lambda c: put(c, 0, (0, 4))), "RDT330", "plan.ownership.classes[0]"),
    (nested("manifest", dtypes=lambda c: put(c, 0, BIG)), "RDT330", "manifest.dtypes"),
    (nested("manifest", shapes=lambda c: put(c, 0, -1)), "RDT330", "manifest.shapes"),
    (nested("manifest", shapes=lambda c: c[:-1]), "RDT330", "manifest.manifest.shapes"),
    (nested("manifest", dtype_table=lambda c: put(c, 0, "int3")), "RDT330", "manifest.dtype_table"),
    (nested("manifest", shape_table=lambda c: put(c, 0, (-1,))), "RDT330", "manifest.shape_table"),
    (nested("manifest", names=lambda c: put(c, 0, c[1])), "RDT330", "manifest.names"),
    (nested("manifest", shape_table=lambda c: put(c, 0, (1, 1))), "", ""),
    (lambda p: evolve(p, groups=put(p.groups, 0, lambda g: evolve(g, first=1))), "RDT330", "plan.groups[0]"),
    (
        lambda p: evolve(p, groups=put(p.groups, 0, lambda g: evolve(g, count=BIG))),
        "RDT330",
        "plan.groups[0]",
    ),
    (
        lambda p: evolve(p, groups=put(p.groups, 0, lambda g: evolve(g, nbytes=1))),
        "RDT330",
        "plan.groups[0].nbytes",
    ),
    (lambda p: evolve(p, groups=p.groups[:-1]), "RDT330", "plan.groups"),
]

FLEET_FAULTS: list[tuple[Change, str, str]] = [
    (nested("topology", replicas=3), "RDT330", "plan.consumers"),
    (nested("topology", tensor_parallel=0), "RDT330", "plan.topology"),
    (nested("topology", tensor_parallel=1, data_parallel=2), "RDT330", "plan.consumers[1]"),
    (lambda p: evolve(p, consumers=p.consumers[:-1]), "RDT330", "plan.consumers"),
    (lambda p: evolve(p, consumers=p.consumers[::-1]), "RDT330", "plan.consumers[0]"),
    (nested("settings", num_rdt_buffers=0), "RDT330", "plan.settings.num_rdt_buffers"),
    (nested("settings", stages_in_flight=0), "RDT330", "plan.settings.stages_in_flight"),
    (nested("settings", gather_lookahead=-1), "RDT330", "plan.settings.gather_lookahead"),
    (nested("settings", max_chunk_bytes=-1), "RDT330", "plan.settings.max_chunk_bytes"),
    (nested("settings", max_chunk_bytes=100), "RDT330", f"{P}chunks.nbytes["),
    (nested("settings", buffer_presize_gb=-1.0), "RDT330", "plan.settings.buffer_presize_gb"),
    (nested("settings", buffer_presize_gb=float("inf")), "RDT330", "plan.settings.buffer_presize_gb"),
    (nested("settings", buffer_presize_gb=float("nan")), "RDT330", "plan.settings.buffer_presize_gb"),
    (nested("settings", staging_device="disk"), "RDT330", "plan.settings.staging_device"),
    (nested("memory", receive_slot_nbytes=64), "RDT330", "plan.memory.receive_slot_nbytes"),
    (
        nested("memory", receive_pool_nbytes=lambda c: put(c, 0, 0)),
        "RDT330",
        "plan.memory.receive_pool_nbytes",
    ),
    (nested("memory", serve_ring_nbytes=lambda c: c[:-1]), "RDT330", "plan.memory.serve_ring_nbytes"),
    (nested("memory", resident_gather_nbytes=()), "RDT330", "plan.memory.resident_gather_nbytes"),
    (nested("overview", pulls=lambda c: put(c, 0, 0)), "RDT330", "plan.overview.pulls"),
    (nested("overview", served_nbytes=()), "RDT330", "plan.overview.served_nbytes"),
    (lambda p: evolve(p, producers=p.producers[:-1]), "RDT330", "plan.producers"),
    (producer(rank=1), "RDT330", "plan.producers"),
    (producer(groups=lambda g: g[1:]), "RDT330", "producers[0].groups"),
    (producer(groups=(BIG,)), "RDT330", "producers[0].groups"),
    (producer(signals=lambda s: put(s, 0, 3)), "RDT330", "producers[0].signals"),
    (producer(group_nbytes=lambda s: put(s, 0, 3)), "RDT330", "producers[0].group_nbytes"),
    (producer(servings=lambda s: s[:-1]), "RDT330", "producers[0].servings"),
    (producer(servings=lambda s: s + s[:1]), "RDT330", "producers[0].servings"),
    (producer(servings=lambda s: put(s, 0, Serving(9, (0,), 1))), "RDT330", "producers[0].servings"),
    (
        producer(servings=lambda s: put(s, 0, lambda x: evolve(x, slot_nbytes=16))),
        "RDT330",
        "producers[0].servings",
    ),
    (producer(servings=lambda s: put(s, 0, lambda x: evolve(x, chunks=x.chunks[::-1]))), "RDT330", ""),
]


@pytest.mark.parametrize("fault", [*WORKER_FAULTS, *SHARED_FAULTS, *FLEET_FAULTS], ids=lambda f: f[2])
def test_sealed_but_impossible_content_is_found(
    tmp_path: Path, plan: FleetPlan, fault: tuple[Change, str, str]
) -> None:
    """All digests fit, the file loads, and verification finds what no worker could execute."""
    change, code, field = fault
    write_plan(with_digests(change(plan)), tmp_path / "forged.plan")
    with PlanFile(tmp_path / "forged.plan") as file:
        read = file.fleet()
    findings = verify_fleet(read)
    assert findings and (not code or findings[0].code == code), findings
    assert findings[0].sentence.startswith(field), findings[0]


@pytest.mark.parametrize("fault", [*WORKER_FAULTS, *SHARED_FAULTS], ids=lambda f: f[2])
def test_a_worker_finds_what_is_impossible_in_its_own_plan(plan: FleetPlan, fault: tuple[Change, str, str]) -> None:
    change, code, field = fault
    forged = with_digests(change(plan))
    findings = check_manifest(forged.manifest) or check_worker(
        forged.consumers[0], forged.manifest, forged.ownership, forged.groups
    )
    assert findings and (not code or findings[0].code == code), findings
    assert findings[0].sentence.startswith(field), findings[0]


@pytest.mark.parametrize("field", ["manifest_digest", "ownership_digest"])
def test_inner_digests_are_checked(plan: FleetPlan, field: str) -> None:
    (finding,) = verify_fleet(evolve(plan, **{field: "0" * 64}))
    assert finding.code == "RDT330" and finding.names == (field,)
    assert "it says '0000000000000000'" in finding.sentence and getattr(plan, field)[:16] in finding.sentence


def test_inner_digests_of_a_worker_are_checked(plan: FleetPlan) -> None:
    (finding,) = verify_fleet(with_program(plan, geometry_digest="0" * 64))
    assert finding.names == ("geometry_digest",)
    c = plan.consumers[0]
    pairs = tuple((rank, "0" * 64) for rank, _ in c.routing.pair_digests)
    forged = evolve(c, routing=evolve(c.routing, pair_digests=pairs))
    (finding,) = verify_fleet(evolve(plan, consumers=(forged, *plan.consumers[1:])))
    assert finding.names == ("routing.pair_digests",)
    rank, digest = c.routing.pair_digests[0]
    assert f"'0000000000000000' for producer {rank}" in finding.sentence and digest[:16] in finding.sentence


def test_a_sound_plan_has_no_findings(plan: FleetPlan) -> None:
    assert verify_fleet(plan) == [] == verify_fleet(with_digests(plan))
    for c in plan.consumers:
        assert check_worker(c, plan.manifest, plan.ownership, plan.groups) == []


# Fields that may say anything: provenance, constants that only a dry run knows, settings that only widen.
FREE = re.compile(
    r"groups\[\]\.label|program\.(untouched|untouched_reasons|position)|provenance\.|fills\.(values|before)"
    r"|seal\.(compiler|model|notes)|seal\.settings\.max_chunk_bytes|seal\.topology\.expert_parallel"
    r"|regions( |$)|(manifest|program)\.(dtype|shape)_table|parameters\.module_names"
)


def leaves(value: Any, label: str) -> Iterator[tuple[str, Any, Any]]:
    """(field, container, key) of every value; key None stands for the container itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        name = f"{label}.{key}" if isinstance(value, dict) else f"{label}[]"
        yield from leaves(inner, name)
        if not isinstance(inner, dict | list):
            yield name, value, key
    if isinstance(value, list) and value:
        yield f"{label} ", value, None


def test_no_random_forgery_raises_and_only_free_fields_pass(path: Path, data: bytes) -> None:
    """A forger can seal again; verification then finds it, and never stumbles."""
    dice = random.Random(7)
    for _ in range(300):
        seal, parts = open_up(data)
        k = dice.randrange(-1, len(parts))
        root, kind = (seal["plan"], "seal") if k < 0 else (parts[k], seal["parts"][k]["kind"])
        fields: dict[str, list[tuple[Any, Any]]] = {}
        for name, container, key in leaves(root, kind):
            fields.setdefault(name, []).append((container, key))
        if not fields:
            continue
        field = dice.choice(sorted(fields))
        container, key = dice.choice(fields[field])
        if key is None:
            at = dice.randrange(len(container))
            container.insert(at, container[at]) if dice.random() < 0.5 else container.pop(at)
        else:
            old = container[key]
            new = {int: [old, 0, -1, 1, BIG, 1 << 62], str: ["", "x", "float32"], float: [1.0, "inf", -1.0]}
            if type(old) is int:
                new[int] += [old + 1, old - 1, 2 * old]
            container[key] = dice.choice(new.get(type(old), [1]))
        forged = close_up(seal, parts)
        if forged == data:
            continue
        path.write_bytes(forged)
        try:
            with PlanFile(path) as file:
                fleet = file.fleet()
        except RdtError:
            continue
        for c in fleet.consumers[:2]:
            _ = check_manifest(fleet.manifest) or check_worker(c, fleet.manifest, fleet.ownership, fleet.groups)
        if not verify_fleet(fleet):
            assert FREE.match(field), field
