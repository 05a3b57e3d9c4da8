"""Lowering: which torch calls have an entry in the closed table, and the value that each yields.

`LOWER` maps a torch function to a function of (operands, keyword arguments, result on meta) that returns the result's
value, or None when this form of the call has none. Operands are `Value`s where the call has tensors or numbers, and
plain Python elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rdtplan.ir.operations import BINARY, NUMBERS, UNARY
from rdtplan.ir.regions import canonical, contiguous_stride
from rdtplan.trace import values
from rdtplan.trace.values import Value, flat_region

Tensor = torch.Tensor
Lower = Callable[[Sequence[Any], dict[str, Any], Tensor], Value | None]


def _named(*names: str) -> set[Any]:
    return {getattr(owner, n) for n in names for owner in (torch, Tensor) if hasattr(owner, n)}


def _same_elements(args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """A copy in logical order: casts, clones, reshapes."""
    value = args[0]
    if out.numel() != value.numel:
        return None
    return values.convert(values.region(value, out.shape, flat_region(value.numel), value.dtype), out.dtype)


def _unary(op: str) -> Lower:
    def lower(args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Value | None:
        plain = len(args) == 1 and not kwargs
        return values.apply(op, (args[0],), out.dtype, out.shape) if plain else None

    return lower


def _binary(op: str, *, swapped: bool = False) -> Lower:
    def lower(args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Value | None:
        operands = [*args, *(kwargs[k] for k in ("other", "exponent") if k in kwargs)]
        rest = {k: v for k, v in kwargs.items() if k not in ("other", "exponent")}
        if rest.pop("alpha", None) not in (None, 1) or rest.pop("rounding_mode", None) is not None or rest:
            return None
        if len(operands) != 2 or not all(isinstance(a, Value) for a in operands):
            return None
        a, b = reversed(operands) if swapped else operands
        if op in ("maximum", "minimum", "div") and a.op in NUMBERS:
            return None
        return values.apply(op, (a, b), out.dtype, out.shape)

    return lower


def _reciprocal_times(args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """`2 / t`: torch multiplies the reciprocal."""
    if len(args) != 2 or kwargs or args[0].dtype != out.dtype:
        return None
    inverse = values.apply("reciprocal", (args[0],), args[0].dtype, args[0].shape)
    return values.apply("mul", (inverse, args[1]), out.dtype, out.shape)


def _cat(args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    tensors = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    kept = [t for t in tensors if t.shape != (0,)]
    return values.cat(kept or tensors[:1], _plain(dim) % out.dim(), out.dtype, out.shape)


def _stack(args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    dim = _plain(args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
    pieces = [
        values.region(t, (*t.shape[:dim], 1, *t.shape[dim:]), flat_region(t.numel), t.dtype) for t in list(args[0])
    ]
    return values.cat(pieces, dim, out.dtype, out.shape)


def _repeat(args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """Tiles: every dimension becomes (how often, how long)."""
    value = args[0]
    lengths = (1,) * (out.dim() - len(value.shape)) + value.shape
    strides = contiguous_stride(lengths)
    sizes = [n for a, b in zip(out.shape, lengths, strict=True) for n in (a // b if b else 0, b)]
    steps = [s for stride in strides for s in (0, stride)]
    return values.region(value, out.shape, canonical(sizes, steps, 0), value.dtype)


def _repeat_interleave(args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    value = args[0]
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if not isinstance(repeats, Value) or repeats.op != "integer":
        return None
    lengths = value.shape if dim is not None else (value.numel,)
    at = (_plain(dim) if dim is not None else 0) % len(lengths)
    strides = contiguous_stride(lengths)
    sizes = (*lengths[: at + 1], repeats.ints[0], *lengths[at + 1 :])
    steps = (*strides[: at + 1], 0, *strides[at + 1 :])
    return values.region(value, out.shape, canonical(sizes, steps, 0), value.dtype)


def _pad(args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """Constant padding: a constant with the argument put into it."""
    value = args[0]
    widths = [_plain(n) for n in (args[1] if len(args) > 1 else kwargs["pad"])]
    mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
    constant = args[3] if len(args) > 3 else kwargs.get("value")
    if mode != "constant" or any(n < 0 for n in widths):
        return None
    fill = _plain(constant) if constant is not None else 0.0
    strides = contiguous_stride(tuple(out.shape))
    offset = sum(widths[2 * i] * strides[-1 - i] for i in range(len(widths) // 2))
    base = values.full(out.dtype, out.shape, fill)
    return values.put(base, value, canonical(value.shape, strides, offset))


def _plain(value: Any) -> Any:
    """The Python number behind an operand."""
    if isinstance(value, Value):
        return value.ints[0] if value.op == "integer" else value.number
    return value


CONVERSIONS = _named(
    *("to", "float", "half", "bfloat16", "double", "int", "long", "short", "char", "bool", "byte", "type", "type_as"),
    *("cpu", "cuda"),
)
"""Casts and moves between devices."""
COPIES = _named(
    *("clone", "contiguous", "reshape", "reshape_as", "flatten", "ravel", "view_as", "ascontiguous", "unflatten")
)
_DUNDERS = {"add": "__add__ __radd__", "mul": "__mul__ __rmul__", "sub": "__sub__", "div": "__truediv__ __div__"}
LOWER: dict[Any, Lower] = {
    **dict.fromkeys(CONVERSIONS | COPIES, _same_elements),
    **{f: _unary(name) for name in UNARY if name != "softplus" for f in _named(name)},
    **{f: _unary("neg") for f in _named("negative", "__neg__")},
    **{f: _unary("abs") for f in _named("absolute", "__abs__")},
    torch.nn.functional.softplus: _unary("softplus"),
    torch.nn.functional.sigmoid: _unary("sigmoid"),
    **{f: _binary(name) for name in BINARY for f in _named(name, *_DUNDERS.get(name, "").split())},
    **{f: _binary("mul") for f in _named("multiply")},
    **{f: _binary("sub") for f in _named("subtract")},
    **{f: _binary("div") for f in _named("divide", "true_divide")},
    **{f: _binary("pow") for f in _named("__pow__")},
    **{f: _binary("sub", swapped=True) for f in _named("rsub", "__rsub__")},
    **{f: _binary("pow", swapped=True) for f in _named("__rpow__")},
    **dict.fromkeys(_named("__rdiv__", "__rtruediv__"), _reciprocal_times),
    **dict.fromkeys(_named("cat", "concat", "concatenate"), _cat),
    torch.stack: _stack,
    **dict.fromkeys(_named("repeat", "tile"), _repeat),
    **dict.fromkeys(_named("repeat_interleave"), _repeat_interleave),
    torch.nn.functional.pad: _pad,
}

_CONSTANTS = {"zeros": 0.0, "ones": 1.0}
CREATORS: dict[Any, float | str] = {
    **{f: v for name, v in _CONSTANTS.items() for f in _named(name, f"{name}_like", f"new_{name}")},
    **dict.fromkeys(_named("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"), "unset"),
    **dict.fromkeys(_named("full", "full_like", "new_full"), "given"),
}
"""Calls that make memory: the constant in it, `given` as an argument, or none."""


def created(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Value | None:
    """The value of freshly made memory."""
    kind = CREATORS[func]
    if kind == "unset":
        return Value("unset", (), out.dtype, out.shape)
    if kind == "given":
        kind = args[-1] if len(args) > 1 else kwargs.get("fill_value")
    if isinstance(kind, bool | int | float):
        return values.full(out.dtype, out.shape, kind)
    return None


IN_PLACE = {
    getattr(Tensor, f"{name}_"): getattr(Tensor, name)
    for name in (*UNARY, *BINARY, "multiply", "subtract", "divide", "true_divide", "negative", "absolute")
    if hasattr(Tensor, f"{name}_") and hasattr(Tensor, name)
} | {
    getattr(Tensor, f"__i{short}__"): getattr(Tensor, f"__{short}__")
    for short in ("add", "sub", "mul", "truediv", "pow")
    if hasattr(Tensor, f"__i{short}__")
}
"""In-place calls and the calls that compute the same elsewhere."""
