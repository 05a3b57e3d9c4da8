"""Evaluation of local operations: the closed table of `rdtplan/ir/operations.py` in plain torch.

An expression is evaluated node by node on the device that its leaves are on. Nothing is looked up by a name from the
plan except in `EVALUATE`, and every result is held to the element type and shape that the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rdtplan.errors import TransferError
from rdtplan.ir.operations import NUMBERS, UNARY, Expression, Node, view_of

Tensor = torch.Tensor
Evaluate = Callable[[Node, Sequence[Any]], Any]


def _region(node: Node, arguments: Sequence[Any]) -> Tensor:
    offset, shape, stride = view_of(node)
    flat = arguments[0].contiguous().reshape(-1).view(getattr(torch, node.dtype))
    return flat.as_strided(shape, stride, flat.storage_offset() + offset).reshape(node.shape).contiguous()


def _put(node: Node, arguments: Sequence[Any]) -> Tensor:
    offset, shape, stride = view_of(node)
    whole = arguments[0].clone(memory_format=torch.contiguous_format)
    whole.as_strided(shape, stride, offset).copy_(arguments[1].reshape(shape))
    return whole


def _sub(node: Node, arguments: Sequence[Any]) -> Tensor:
    a, b = arguments
    return torch.sub(a, b) if isinstance(a, Tensor) else torch.rsub(b, a)


def _swap_numbers(op: Callable[[Any, Any], Tensor]) -> Evaluate:
    """For operations that commute: torch wants the tensor first."""
    return lambda node, a: op(a[0], a[1]) if isinstance(a[0], Tensor) else op(a[1], a[0])


def _unary(name: str) -> Evaluate:
    op = torch.nn.functional.softplus if name == "softplus" else getattr(torch, name)
    return lambda node, a: op(a[0])


EVALUATE: dict[str, Evaluate] = {
    "leaf": lambda node, leaves: leaves[node.ints[0]].reshape(node.shape),
    "integer": lambda node, a: node.ints[0],
    "real": lambda node, a: node.number,
    "full": lambda node, device: torch.full(
        node.shape, node.number, dtype=getattr(torch, node.dtype), device=device[0]
    ),
    "convert": lambda node, a: a[0].to(getattr(torch, node.dtype)),
    "region": _region,
    "put": _put,
    "cat": lambda node, a: torch.cat(list(a), dim=node.ints[0]),
    **{name: _unary(name) for name in UNARY},
    "add": _swap_numbers(torch.add),
    "sub": _sub,
    "mul": _swap_numbers(torch.mul),
    "div": lambda node, a: torch.div(a[0], a[1]),
    "pow": lambda node, a: torch.pow(a[0], a[1]),
    "maximum": lambda node, a: torch.maximum(a[0], a[1]),
    "minimum": lambda node, a: torch.minimum(a[0], a[1]),
}


def evaluate(expression: Expression, leaves: Sequence[Tensor], device: torch.device) -> Tensor:
    """The value of an expression; TransferError RDT625 when torch gives another type or shape than the plan says."""
    found: list[Any] = []
    for k, node in enumerate(expression.nodes):
        given: Sequence[Any] = [found[a] for a in node.arguments]
        if node.op == "leaf":
            given = leaves
        elif node.op == "full":
            given = [device]
        value = EVALUATE[node.op](node, given)
        found.append(value)
        if node.op in NUMBERS:
            continue
        if tuple(value.shape) != node.shape or value.dtype != getattr(torch, node.dtype):
            raise TransferError(
                f"operation {node.op} (node {k}) gives {value.dtype} {tuple(value.shape)}, "
                f"the plan says {node.dtype} {node.shape}",
                fix="compile the plan with the torch that this worker runs",
                code="RDT625",
            )
    return found[-1]  # type: ignore[no-any-return]
