"""Long columns: packed and back, never more than they say, and the same bytes every time."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs import evolve
from forgery import forge, open_up, part_index
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import Scenario, Sizes, make_plan, scenarios

from rdtplan.errors import PlanFormatError
from rdtplan.ir import columns
from rdtplan.ir import file as plan_file
from rdtplan.ir.file import PlanFile, encode, write_plan
from rdtplan.ir.operations import Expression, Node
from rdtplan.ir.plan import FleetPlan, Waiver
from rdtplan.ir.topology import InferenceTopology, TransferSettings
from rdtplan.verify import verify_fleet

INTS = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.one_of(st.lists(INTS), st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)).map(lambda c: c * 7)))
def test_a_column_comes_back(column: list[int]) -> None:
    packed = columns.pack(tuple(column))
    assert columns.unpack(packed) == tuple(column)
    assert columns.pack(tuple(column)) == packed


def test_what_repeats_costs_nothing() -> None:
    layer = tuple(x * x % 97 for x in range(393))
    shifted = tuple(x + 1000 * k for k in range(94) for x in layer)
    for column in (tuple(range(36945)), (5,) * 36945, layer * 94, shifted):
        packed = columns.pack(column)
        assert len(packed["literals"]) + len(packed["copies"]) < len(layer) + 12
        assert columns.unpack(packed) == column


@given(st.lists(st.sampled_from((0, 1, 5, 9))).map(tuple), st.booleans())
def test_a_dictionary_names_the_same_values(column: tuple[int, ...], text: bool) -> None:
    values: tuple[Any, ...] = tuple(map(str, column)) if text else column
    coded = columns.dictionary(values)
    if coded:
        codes, table = coded
        assert columns.look_up(codes, table, str if text else int) == values
        assert list(dict.fromkeys(codes)) == list(range(len(table)))


BAD: list[Any] = [
    None,
    [],
    {},
    {"length": 1, "literals": [], "copies": []},
    {"length": 0, "literals": [1], "copies": []},
    {"length": 1 << 60, "literals": [1], "copies": [1, 1, (1 << 60) - 1]},
    {"length": columns.MAX_ENTRIES, "literals": [1], "copies": [1, 1, 1 << 60]},
    {"length": 8, "literals": [1], "copies": [1, 2, 7]},
    {"length": 8, "literals": [1], "copies": [1, 0, 7]},
    {"length": 8, "literals": [1], "copies": [2, 1, 6]},
    {"length": 8, "literals": [1, 2], "copies": [-1, 1, 6]},
    {"length": 8, "literals": [1], "copies": [1, 1, -7]},
    {"length": 8, "literals": [1], "copies": [1, 1]},
    {"length": 8, "literals": [1.0], "copies": [1, 1, 7]},
    {"length": 8, "literals": [True], "copies": [1, 1, 7]},
    {"length": 8.0, "literals": [1], "copies": [1, 1, 7]},
    {"length": 8, "literals": [(1 << 62)], "copies": [1, 1, 7]},
    {"length": 8, "literals": "1", "copies": [1, 1, 7]},
]


@pytest.mark.parametrize("body", BAD, ids=str)
def test_an_impossible_column_is_refused_before_it_is_expanded(body: Any) -> None:
    with pytest.raises(TypeError):
        columns.unpack(body)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small plans have no long columns; with this, four entries are long."""
    monkeypatch.setattr(columns, "LONG", 4)


@pytest.mark.usefixtures("short")
@settings(max_examples=25)
@given(scenarios())
def test_every_plan_survives_with_its_columns_apart(tmp_path_factory: pytest.TempPathFactory, s: Scenario) -> None:
    target = tmp_path_factory.getbasetemp() / "columns.plan"
    plan = make_plan(s)
    write_plan(plan, target)
    with PlanFile(target) as file:
        assert file.fleet() == plan
    with PlanFile(target) as file:
        assert file.consumer(0) == plan.consumers[0] and file.producer(0) == plan.producers[0]
    assert verify_fleet(plan) == []


@pytest.mark.usefixtures("short")
def test_tensor_parallel_ranks_share_their_tables() -> None:
    """Only regions differ between ranks: every further rank costs its region table and little else."""
    sizes = Sizes(layers=6, dense_layers=1, experts=8, heads=8, kv_heads=8, head_dim=4, intermediate=32, vocab=64)
    one, four = (
        encode(make_plan(Scenario(sizes=sizes, topology=InferenceTopology(tp), trainer_ranks=2)))[0] for tp in (2, 8)
    )
    kinds = [[e["kind"] for e in open_up(data)[0]["parts"]] for data in (one, four)]
    for column in ("source", "offset", "parameter", "key", "scatter_chain"):
        assert kinds[1].count(column) <= 2, column
    regions = sum(e["nbytes"] for e in open_up(four)[0]["parts"] if e["kind"] == "regions")
    shared = sum(e["nbytes"] for e in open_up(four)[0]["parts"] if e["kind"] != "regions")
    assert regions and shared < 1.5 * sum(e["nbytes"] for e in open_up(one)[0]["parts"] if e["kind"] != "regions")


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update({"$part": 9999}), "reference to part 9999"),
        (lambda v: v.update({"$part": "0"}), "expected a column or a reference"),
        (lambda v: v.update({"of": [0]}), "codes, 0 to"),
        (lambda v: v["of"].append(0), "codes, 0 to"),
        (lambda v: v.update({"of": ["x"]}), "of: expected an array of int"),
    ],
)
def test_a_forged_column_is_refused_with_its_path(tmp_path: Path, change: Any, words: str) -> None:
    data = encode(make_plan(Scenario(topology=InferenceTopology(2))))[0]

    def edit(seal: Any, parts: Any) -> None:
        change(parts[part_index(seal, "keys")]["region"])

    forge(data, tmp_path / "p", edit)
    with pytest.raises(PlanFormatError) as caught, PlanFile(tmp_path / "p") as file:
        file.fleet()
    assert caught.value.code == "RDT404" and words in caught.value.message, caught.value.message


@pytest.mark.usefixtures("short")
def test_columns_cannot_take_more_memory_than_the_file_may_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(make_plan(Scenario(topology=InferenceTopology(2))))[0]
    monkeypatch.setattr(plan_file, "FREE_ENTRIES", 1000)

    def edit(seal: Any, parts: Any) -> None:
        bomb = {"length": columns.MAX_ENTRIES, "literals": [1], "copies": [1, 1, columns.MAX_ENTRIES - 1]}
        parts[part_index(seal, "source")] = bomb

    forge(data, tmp_path / "p", edit)
    with pytest.raises(PlanFormatError) as caught, PlanFile(tmp_path / "p") as file:
        file.fleet()
    assert caught.value.code == "RDT404" and "4,19" in caught.value.message, caught.value.message


# -- every field -----------------------------------------------------------------------------------------------


def changed(value: Any, t: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if value is None:
        return 1 if "int" in str(t) else "x"
    if isinstance(value, tuple) and value and not attrs.has(type(value[0])):
        return (changed(value[0], None), *value[1:])
    if "Expression" in str(t):  # a table that this scenario leaves empty
        return (Expression((Node("leaf", (), "float32", (1,), (0,)),)),)
    if isinstance(value, tuple):
        return value[1:] if value else (1,) if "int" in str(t) else ("x",)
    raise AssertionError(f"no other value of {t}")


def variants(value: Any, where: str) -> list[tuple[str, Any]]:
    """(field, copy of `value` in which that one field differs) for all fields of all classes inside."""
    found: list[tuple[str, Any]] = []
    for a in attrs.fields(type(value)):
        old = getattr(value, a.name)
        name = f"{where}.{a.name}"
        if attrs.has(type(old)):
            found += [(n, evolve(value, **{a.name: v})) for n, v in variants(old, name)]
        elif isinstance(old, tuple) and old and attrs.has(type(old[0])):
            found += [(n, evolve(value, **{a.name: (v, *old[1:])})) for n, v in variants(old[0], f"{name}[0]")]
            found.append((f"{name} (one less)", evolve(value, **{a.name: old[:-1]})))
        else:
            found.append((name, evolve(value, **{a.name: changed(old, a.type)})))
    return found


@pytest.mark.parametrize("long", [4, 256])
def test_every_field_reaches_the_wire_and_comes_back(
    tmp_path: Path, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever field a class has or gets: changing it changes the file, and reading gives the changed value."""
    monkeypatch.setattr(columns, "LONG", long)
    plan = make_plan(
        Scenario(
            topology=InferenceTopology(replicas=2), settings=TransferSettings(max_chunk_bytes=256), trainer_ranks=2
        )
    )
    plan = evolve(plan, notes=("a note",), waivers=(Waiver("RDT320", "x.*"),))
    assert plan.consumers[0].program.fills.values, "the scenario must fill every table"
    original, _ = encode(plan)
    seen: set[str] = set()
    for name, other in variants(plan, "plan"):
        data, _ = encode(other)
        assert data != original, name
        (tmp_path / "p").write_bytes(data)
        with PlanFile(tmp_path / "p") as file:
            assert file.fleet() == other, name
        seen.add(name)
    classes: set[type] = set()
    collect(FleetPlan, classes)
    assert len(seen) >= sum(len(attrs.fields(c)) for c in classes) - len(classes)


def collect(cls: Any, found: set[type]) -> None:
    """All attrs classes that a class is made of."""
    if attrs.has(cls) and cls not in found:
        found.add(cls)
        attrs.resolve_types(cls)
        for a in attrs.fields(cls):
            collect(a.type, found)
    for inner in getattr(cls, "__args__", ()):
        collect(inner, found)


@pytest.mark.usefixtures("short")
def test_a_table_entry_that_nothing_uses_is_refused(tmp_path: Path) -> None:
    """There is one spelling of a dictionary column; another would be another file of the same plan."""
    data = encode(make_plan(Scenario(topology=InferenceTopology(2))))[0]

    def edit(seal: Any, parts: Any) -> None:
        column = parts[part_index(seal, "keys")]["region"]
        column["of"].append(column["of"][0])

    forge(data, tmp_path / "p", edit)
    with pytest.raises(PlanFormatError), PlanFile(tmp_path / "p") as file:
        file.fleet()


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(columns).failed == 0
