"""Local operations: the closed table, its evaluation, and what a plan that holds them is refused for.

The loaders that lead to operations are in `test_trace_refusals.py`, real models in `test_oracle.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from attrs import evolve
from forgery import with_digests, with_program
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import TinyModel
from torch import Tensor

from rdtexec.destination import Destination
from rdtexec.operations import EVALUATE, evaluate
from rdtexec.plans import load_worker
from rdtplan.errors import TransferError
from rdtplan.ir.file import PlanFile, write_plan
from rdtplan.ir.manifest import SourceTensor
from rdtplan.ir.operations import BINARY, NUMBERS, TABLE, UNARY, Expression, Leaves, Node, Operations, flaw
from rdtplan.ir.plan import FleetPlan, Program
from rdtplan.trace import lowering
from rdtplan.verify import verify_fleet

CPU = torch.device("cpu")


# -- the table -------------------------------------------------------------------------------------------------


def test_both_tables_have_the_same_entries() -> None:
    """Rule: what a plan may name is exactly what the runtime evaluates."""
    assert EVALUATE.keys() == TABLE.keys()
    assert set(UNARY) | set(BINARY) | set(NUMBERS) < set(TABLE)


def leaf(k: int, shape: tuple[int, ...], dtype: str = "float32") -> Node:
    return Node("leaf", (), dtype, shape, (k,))


def test_unary_entries_are_torchs() -> None:
    """Rule: an entry computes, bit for bit, what the torch function of its name computes."""
    x = torch.rand(3, 5) + 0.1
    for name in UNARY:
        node = Node(name, (0,), "float32", (3, 5))
        wanted = torch.nn.functional.softplus(x) if name == "softplus" else getattr(torch, name)(x)
        assert flaw(Expression((leaf(0, (3, 5)), node))) == ""
        assert torch.equal(evaluate(Expression((leaf(0, (3, 5)), node)), [x], CPU), wanted)


NUMBER = {"integer": Node("integer", (), "int64", (), (3,)), "real": Node("real", (), "float64", (), (), 1.7)}


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16")])
@pytest.mark.parametrize("kind", ["tensors", "integer", "real", "number first", "scalar tensor"])
@pytest.mark.parametrize("name", BINARY)
def test_binary_entries_are_torchs(name: str, kind: str, dtypes: tuple[str, str]) -> None:
    """Rule: the promotion that `flaw` computes is torch's, and the result is bit for bit what torch gives."""
    a = (torch.rand(3, 1) + 0.5).to(getattr(torch, dtypes[0]))
    shape = () if kind == "scalar tensor" else (2, 1, 4)
    b: Any = (torch.rand(shape) + 0.5).to(getattr(torch, dtypes[1]))
    nodes: list[Node] = [leaf(0, (3, 1), dtypes[0]), leaf(1, shape, dtypes[1])]
    leaves = [a, b]
    operands: tuple[Any, Any] = (a, b)
    if kind in ("integer", "real", "number first"):
        number = NUMBER["real" if kind == "number first" else kind]
        nodes, leaves = [leaf(0, (3, 1), dtypes[0]), number], [a]
        value = 3 if kind == "integer" else 1.7
        operands = (value, a) if kind == "number first" else (a, value)
    if name in ("maximum", "minimum") and kind not in ("tensors", "scalar tensor"):
        pytest.skip("torch takes tensors only")
    if kind == "number first" and name == "div":
        pytest.skip("torch multiplies the reciprocal, and so does the lowering")
    order = (1, 0) if kind == "number first" else (0, 1)
    torch_op = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y}.get(
        name, getattr(torch, name)
    )
    wanted = torch_op(*operands)
    node = Node(name, order, str(wanted.dtype).removeprefix("torch."), tuple(wanted.shape))
    expression = Expression((*nodes, node))
    assert flaw(expression) == ""
    assert torch.equal(evaluate(expression, leaves, CPU), wanted)


def test_a_result_that_is_not_the_plans_is_refused() -> None:
    """Rule: the runtime holds every node to the type and shape that the plan says."""
    wrong = Expression((leaf(0, (2,)), Node("exp", (0,), "bfloat16", (2,))))
    with pytest.raises(TransferError, match="gives torch") as caught:
        evaluate(wrong, [torch.ones(2)], CPU)
    assert caught.value.code == "RDT625"


FLAWED: dict[str, tuple[Node, ...]] = {
    "0 nodes": (),
    "there is no such operation": (leaf(0, (2,)), Node("eval", (0,), "float32", (2,))),
    "must be earlier nodes": (leaf(0, (2,)), Node("exp", (1,), "float32", (2,))),
    "it takes 1 to 1 arguments": (leaf(0, (2,)), Node("exp", (0, 0), "float32", (2,))),
    "its leaves are numbered [1]": (leaf(1, (2,)),),
    "unknown dtype": (Node("leaf", (), "float33", (2,), (0,)),),
    "negative size": (Node("leaf", (), "float32", (-2,), (0,)),),
    "it gives shape (2,), not (3,)": (leaf(0, (2,)), Node("exp", (0,), "float32", (3,))),
    "it gives float32, not int32": (leaf(0, (2,)), Node("exp", (0,), "int32", (2,))),
    "do not go together": (leaf(0, (2,)), leaf(1, (3,)), Node("add", (0, 1), "float32", (3,))),
    "depends on torch's default": (leaf(0, (2,), "int32"), NUMBER["real"], Node("mul", (0, 1), "float32", (2,))),
    "both arguments are numbers": (NUMBER["real"], NUMBER["real"], Node("add", (0, 1), "float32", ())),
    "a number cannot stand here": (NUMBER["real"], Node("exp", (0,), "float32", ())),
    "it ends in a number": (NUMBER["real"],),
    "a number is a int64": (Node("integer", (), "int32", (), (1,)),),
    "it ends at element 5 of 4": (leaf(0, (4,)), Node("region", (0,), "float32", (2,), (3, 2, 1))),
    "it reads 2 elements and gives 3": (leaf(0, (4,)), Node("region", (0,), "float32", (3,), (0, 2, 1))),
    "an attribute is negative": (leaf(0, (4,)), Node("region", (0,), "float32", (2,), (3, 2, -1))),
    "no offset, sizes and strides": (leaf(0, (4,)), Node("region", (0,), "float32", (2,), (3, 2))),
    "no whole number of float64": (leaf(0, (3,)), Node("region", (0,), "float64", (1,), (0, 1, 1))),
    "it puts float32 into int32": (
        leaf(0, (3,), "int32"),
        leaf(1, (1,)),
        Node("put", (0, 1), "int32", (3,), (0, 1, 1)),
    ),
    "it ends at element 4 of 3": (leaf(0, (3,)), leaf(1, (1,)), Node("put", (0, 1), "float32", (3,), (3, 1, 1))),
    "do not stand together": (leaf(0, (2, 3)), leaf(1, (2, 4)), Node("cat", (0, 1), "float32", (4, 3), (0,))),
    "there is no dimension 1": (leaf(0, (2,)), Node("cat", (0,), "float32", (2,), (1,))),
    "it has 2 attributes": (leaf(0, (2,)), Node("exp", (0,), "float32", (2,), (1, 2))),
}


@pytest.mark.parametrize("reason", FLAWED)
def test_a_flawed_expression_is_told(reason: str) -> None:
    """Rule: an expression that cannot be evaluated is found by arithmetic alone, and the reason is given."""
    assert reason in flaw(Expression(FLAWED[reason]))


def test_promotion_is_torchs() -> None:
    """Rule: the element type of a mixed operation is the one that torch gives."""
    names = ["uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    for a in names:
        for b in names:
            wanted = torch.promote_types(getattr(torch, a), getattr(torch, b))
            node = Node("add", (0, 1), str(wanted).removeprefix("torch."), (2,))
            if {a, b} != {"uint8", "int8"}:  # int16; the evaluation refuses what is not the plan's
                assert flaw(Expression((leaf(0, (2,), a), leaf(1, (2,), b), node))) == ""


# -- plans with operations ---------------------------------------------------------------------------------------

ENTRIES = [
    SourceTensor("a", "float32", (4, 3)),
    SourceTensor("b", "float32", (4, 3)),
    SourceTensor("c", "float32", (3,)),
]


def build() -> TinyModel:
    """Two leaf modules; the first is computed, the second copied."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        if name == "a":
            model.kept = -torch.exp(tensor)
        elif name == "b":
            model.first.w.copy_(model.kept + tensor)
            model.first.w.data.copy_(model.first.w * 2)
            del model.kept
        else:
            model.second.w.copy_(tensor)

    model = TinyModel(load)
    model.first, model.second = torch.nn.Module(), torch.nn.Module()
    model.first.w = torch.nn.Parameter(torch.empty(4, 3), requires_grad=False)
    model.second.w = torch.nn.Parameter(torch.empty(3), requires_grad=False)
    return model


@pytest.fixture
def plan() -> FleetPlan:
    return oracle.tiny_plan(build(), ENTRIES)


def test_operands_are_in_the_plan_and_not_in_the_geometry(plan: FleetPlan) -> None:
    """Rule: operands are rows that no live model has; fetches go into them, and operations read them in order."""
    program = plan.consumers[0].program
    assert program.parameters.names == ("first.w", "second.w", "first.w#0", "first.w#1")
    assert program.parameters.kinds == ("parameter", "parameter", "operand", "operand")
    assert sorted(program.scatters.parameter) == [1, 2, 3]
    assert program.operations.parameters == (0, 0) and program.leaves.rows == (2, 3, 0)
    assert plan.overview.parameters == (2,)
    assert verify_fleet(plan) == []


def test_a_plan_with_operations_survives_its_file(plan: FleetPlan, tmp_path: Path) -> None:
    """Rule: what is written is what is read, and a worker loads and executes it."""
    write_plan(plan, tmp_path / "fleet.plan")
    with PlanFile(tmp_path / "fleet.plan") as file:
        assert file.fleet() == plan
    worker = load_worker(tmp_path / "fleet.plan", 0)
    sources = oracle.random_sources(ENTRIES)
    stock, planned = build(), build()
    oracle.load_stock(stock, sources)
    oracle.load_planned(planned, worker.consumer.program, worker.manifest, sources, "packed")
    assert oracle.compare(stock, planned) == {}


def test_operands_hold_memory_only_during_a_sync(plan: FleetPlan) -> None:
    """Rule: operands are allocated when their module is materialized and freed when it is computed."""
    destination = Destination(build(), plan.consumers[0].program)
    assert all(destination.tensors[row].is_meta for row in (2, 3))
    module = plan.consumers[0].program.parameters.modules[2]
    destination.fill(module)
    assert not any(destination.tensors[row].is_meta for row in (2, 3))
    destination.evaluate(module)
    assert all(destination.tensors[row].is_meta for row in (2, 3))


def column(table: Any, name: str, at: int, value: int) -> Any:
    values = list(getattr(table, name))
    values[at] = value
    return evolve(table, **{name: tuple(values)})


def node(at: int, **changes: Any) -> Callable[[Any], Any]:
    """Change one node of the first expression."""

    def change(expressions: tuple[Expression, ...]) -> tuple[Expression, ...]:
        nodes = list(expressions[0].nodes)
        nodes[at] = evolve(nodes[at], **changes)
        return (Expression(tuple(nodes)), *expressions[1:])

    return change


def kinds(program: Program) -> Any:
    return evolve(program.parameters, kinds=("operand", *program.parameters.kinds[1:]))


FORGED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an unknown operation": ({"expressions": node(1, op="system")}, "RDT331", "there is no such operation"),
    "a cycle": ({"expressions": node(1, arguments=(1,))}, "RDT331", "must be earlier nodes"),
    "a leaf of another type": ({"expressions": node(0, dtype="float16")}, "RDT331", "it gives float16, not float32"),
    "another element count": (
        {"leaves": lambda t: column(t, "regions", 0, 0), "regions": lambda r: (evolve(r[0], shape=(3,)), *r[1:])},
        "RDT331",
        "it reads 3 elements",
    ),
    "a leaf of another module": ({"leaves": lambda t: column(t, "rows", 2, 1)}, "RDT331", "of another module"),
    "a leaf outside": ({"leaves": lambda t: column(t, "rows", 0, 99)}, "RDT330", "index 99 is outside"),
    "an expression outside": ({"operations": lambda t: column(t, "expressions", 0, 9)}, "RDT330", "index 9"),
    "leaf ends that fall": ({"operations": lambda t: column(t, "leaf_end", 0, 5)}, "RDT330", "must ascend"),
    "a missing leaf": ({"operations": lambda t: column(t, "leaf_end", 0, 1)}, "RDT331", "it has 1 leaves"),
    "a write into an operand": ({"operations": lambda t: column(t, "parameters", 1, 2)}, "RDT331", "only fetches"),
    "an operand that nobody reads": (
        {"leaves": lambda t: column(t, "rows", 1, 2)},
        "RDT331",
        "no operation reads",
    ),
    "no origin": (
        {"provenance": lambda t: evolve(t, operation_loader=())},
        "RDT330",
        "an operation lacks its origin",
    ),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_operation_is_refused(plan: FleetPlan, what: str) -> None:
    """Rule: a plan whose operations cannot be is found by its tables alone, whoever sealed it."""
    changes, code, sentence = FORGED[what]
    findings = verify_fleet(with_digests(with_program(plan, **changes)))
    assert code in {f.code for f in findings}, findings
    assert any(sentence in f.sentence for f in findings), findings


def test_growth_is_bounded(plan: FleetPlan) -> None:
    """Rule: a plan cannot make a worker allocate much more than it reads and writes."""
    big = Node("full", (), "float32", (1 << 40,), (), 0.0)
    cut = Node("region", (1,), "float32", (4, 3), (0, 12, 1))
    expressions = plan.consumers[0].program.expressions
    k = plan.consumers[0].program.operations.expressions[1]
    forged = (*expressions[:k], Expression((expressions[k].nodes[0], big, cut)), *expressions[k + 1 :])
    findings = verify_fleet(with_digests(with_program(plan, expressions=forged)))
    assert [f.code for f in findings] == ["RDT331"] and "1,099,511,627,776 elements" in findings[0].sentence


def test_a_rewrite_is_no_double_write_and_another_operation_is(plan: FleetPlan) -> None:
    """Rule: an operation that reads what it overwrites counts for nothing; any other is one write."""
    program = plan.consumers[0].program
    twice = Operations((0, 0, 0), (program.operations.regions[0],) * 3, (0, 0, 1), (2, 4, 5))
    leaves = Leaves((2, 3, 2, 3, 0), (program.leaves.regions[0],) * 5)
    provenance = evolve(program.provenance, operation_loader=(0, 0, 0))
    findings = verify_fleet(with_digests(with_program(plan, operations=twice, leaves=leaves, provenance=provenance)))
    assert [f.code for f in findings] == ["RDT312"]


def test_an_operation_may_not_read_what_comes_later(plan: FleetPlan) -> None:
    """Rule: a leaf must have been written by a copy, a constant or an earlier operation."""
    program = plan.consumers[0].program
    o, x = program.operations, program.leaves
    swapped = Operations(o.parameters[::-1], o.regions[::-1], o.expressions[::-1], (1, 3))
    leaves = Leaves((x.rows[2], *x.rows[:2]), (x.regions[2], *x.regions[:2]))
    findings = verify_fleet(with_digests(with_program(plan, operations=swapped, leaves=leaves)))
    assert "RDT315" in {f.code for f in findings}


# -- lowering ----------------------------------------------------------------------------------------------------


def test_every_lowered_call_names_the_closed_table() -> None:
    """Rule: in-place forms have a plain form, and that one is lowered."""
    assert set(lowering.IN_PLACE.values()) <= set(lowering.LOWER)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_random_loaders_give_stock_bytes(data: st.DataObject) -> None:
    """Rule: any sequence of views, casts, arithmetic and scratch gives the plan the bytes that it gives the model."""
    steps = data.draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6))
    numbers = data.draw(st.lists(st.integers(0, 1 << 16), min_size=len(steps), max_size=len(steps)))

    def load(model: Any, name: str, tensor: Tensor) -> None:
        x = tensor
        for step, number in zip(steps, numbers, strict=True):
            x = STEPS[step](x, number)
        flat = x.reshape(-1)
        while flat.numel() < 24:
            flat = flat.repeat(2)
        model.w.copy_(flat[-24:].view(4, 6))
        model.rest.copy_(tensor)

    def model() -> TinyModel:
        made = TinyModel(load)
        made.w = torch.nn.Parameter(torch.empty(4, 6, dtype=torch.bfloat16), requires_grad=False)
        made.rest = torch.nn.Parameter(torch.empty(6, 4, dtype=torch.float32), requires_grad=False)
        return made

    listed = [SourceTensor("x", "float32", (6, 4))]
    sources = oracle.finite_sources(listed)
    stock, planned, live = model(), model(), model()
    oracle.load_stock(stock, sources)
    if not torch.isfinite(stock.w.float()).all():
        return  # NaNs of which torch says nothing
    program = oracle.tiny_plan(live, listed).consumers[0].program
    oracle.load_planned(planned, program, oracle.build_manifest(listed), sources, "packed")
    assert oracle.compare(stock, planned) == {}, steps


def _shape_of(x: Tensor, number: int) -> Tensor:
    divisors = [d for d in range(1, x.numel() + 1) if x.numel() % d == 0]
    return x.reshape(divisors[number % len(divisors)], -1)


def _rows(x: Tensor, number: int) -> Tensor:
    x = x.reshape(x.shape[0], -1) if x.dim() > 1 else x
    return x[number % 2 :] if x.shape[0] > 2 else x


def _into_scratch(x: Tensor, number: int) -> Tensor:
    scratch = torch.empty(x.shape, dtype=torch.float32)
    scratch.copy_(x)
    scratch.reshape(-1)[: number % 5].fill_(0.25)
    return scratch


def _in_place(x: Tensor, number: int) -> Tensor:
    y = x.clone()
    y.mul_(0.5)
    y.reshape(-1)[number % 3 :].neg_()
    return y


STEPS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "transpose": lambda x, n: x.t() if x.dim() == 2 else x,
    "reshape": _shape_of,
    "rows": _rows,
    "columns": lambda x, n: x[:, ::2] if x.dim() == 2 and x.shape[1] > 2 else x,
    "contiguous": lambda x, n: x.contiguous(),
    "cast": lambda x, n: x.to((torch.bfloat16, torch.float32, torch.float16)[n % 3]),
    "negate": lambda x, n: -x,
    "exponential": lambda x, n: torch.exp(x * 0.1),
    "scale": lambda x, n: x * (n % 7 - 3),
    "shift": lambda x, n: 0.5 + x,
    "join": lambda x, n: torch.cat([x, x[:1] + 1]),
    "stack": lambda x, n: torch.stack([x, x.abs()], dim=n % (x.dim() + 1)).flatten(0, 1),
    "tile": lambda x, n: x.repeat(2, *(1,) * (x.dim() - 1)),
    "interleave": lambda x, n: x.repeat_interleave(2, dim=n % x.dim()),
    "scratch": _into_scratch,
    "in place": _in_place,
}
