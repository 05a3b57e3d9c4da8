"""Local operations: what a worker computes from landed data because no slice of a source is it.

A loader may cast, negate, exponentiate, concatenate, or rewrite a parameter from itself. What goes over the wire are
slices all the same; what is left is an *expression*, evaluated after a module's last scatter and before its
post-processing. Expressions are data: every node names an entry of the closed `TABLE`, so a plan holds no code, and
what a node yields (element type and shape) is arithmetic that `flaw` checks without torch.

Rules of evaluation, which hold for every node:

- an operation's nodes stand in evaluation order: arguments come before their uses, the last node is what is written;
- every value is a contiguous tensor of the node's element type and shape, or, for `integer` and `real`, a number;
- the element types of a result follow torch's promotion: a tensor with dimensions outweighs a scalar tensor, which
  outweighs a number, unless the lighter one is of a higher kind (a real number makes integers real).
"""

from math import prod

from attrs import frozen

from rdtplan.ir.dtypes import ITEMSIZE
from rdtplan.ir.manifest import Ints
from rdtplan.ir.regions import Region, span


@frozen(slots=True)
class Node:
    """One step of an expression."""

    op: str
    """Name in `TABLE`."""
    arguments: Ints
    """Earlier nodes of the same expression."""
    dtype: str
    shape: Ints
    ints: Ints = ()
    """Attributes; see the entry of `op`."""
    number: float = 0.0
    """Attribute of `real` and `full`."""


@frozen(slots=True)
class Expression:
    """A computation that many operations share (a layer, an expert each): its leaves are numbered."""

    nodes: tuple[Node, ...]

    @property
    def leaves(self) -> int:
        """Number of leaves."""
        return sum(node.op == "leaf" for node in self.nodes)


@frozen(slots=True)
class Operations:
    """Writes of a computed value, in record order."""

    parameters: Ints
    regions: Ints
    """Where the value goes, in logical order."""
    expressions: Ints
    leaf_end: Ints
    """Leaves of operation k are `leaf_end[k-1] : leaf_end[k]` of the leaf table."""

    def __len__(self) -> int:
        return len(self.parameters)


@frozen(slots=True)
class Leaves:
    """Landed memory that operations read: operands, and parameters with the value they have at that point."""

    rows: Ints
    """Rows of the parameter table."""
    regions: Ints

    def __len__(self) -> int:
        return len(self.rows)


NO_OPERATIONS, NO_LEAVES = Operations((), (), (), ()), Leaves((), ())


@frozen(slots=True)
class Entry:
    """What stands behind the name of an operation."""

    arguments: tuple[int, int]
    """Least and most arguments."""
    meaning: str


_ANY = 1 << 20
UNARY = (
    "neg",
    "abs",
    "exp",
    "expm1",
    "log",
    "log1p",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "square",
    "sigmoid",
    "softplus",
    "tanh",
)
BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum")
TABLE: dict[str, Entry] = {
    "leaf": Entry((0, 0), "the landed region of leaf ints[0], as a tensor of this shape"),
    "integer": Entry((0, 0), "the number ints[0]"),
    "real": Entry((0, 0), "the number `number`"),
    "full": Entry((0, 0), "a tensor whose elements all are `number`"),
    "convert": Entry((1, 1), "the argument with its elements converted to this type"),
    "region": Entry(
        (1, 1), "elements of the argument's flat memory, read as this type: ints are offset, sizes, strides"
    ),
    "put": Entry((2, 2), "the first argument, with the second at ints (offset, sizes, strides) of its flat memory"),
    "cat": Entry((1, _ANY), "the arguments one after another along dimension ints[0]"),
    **{name: Entry((1, 1), f"torch.{name}, element by element") for name in UNARY},
    **{name: Entry((2, 2), f"torch.{name}, element by element, broadcasting") for name in BINARY},
}
"""The closed table. `rdtexec/operations.py` evaluates exactly these."""

NUMBERS = ("integer", "real")
MOST_NODES = 4096
"""Nodes of one expression."""
MOST_GROWTH = 64
"""A node may have this many times the elements of the leaves and the destination together."""


def view_of(node: Node) -> tuple[int, Ints, Ints]:
    """(offset, sizes, strides) of a `region` or `put`."""
    rank = (len(node.ints) - 1) // 2
    return node.ints[0], node.ints[1 : 1 + rank], node.ints[1 + rank :]


def flaw(expression: Expression) -> str:
    """Why an expression cannot be evaluated, '' when it can. Every node has the type and shape its entry gives."""
    nodes = expression.nodes
    if not 0 < len(nodes) <= MOST_NODES:
        return f"it has {len(nodes)} nodes"
    numbers = [node.ints[0] for node in nodes if node.op == "leaf" and len(node.ints) == 1]
    if sorted(numbers) != list(range(expression.leaves)):
        return f"its leaves are numbered {numbers}"
    for k, node in enumerate(nodes):
        if found := _flaw_of(node, k, nodes):
            return f"node {k} ({node.op}): {found}"
    return f"it ends in a number, {nodes[-1].op}" if nodes[-1].op in NUMBERS else ""


def _flaw_of(node: Node, k: int, nodes: tuple[Node, ...]) -> str:
    entry = TABLE.get(node.op)
    if entry is None:
        return "there is no such operation"
    least, most = entry.arguments
    if not least <= len(node.arguments) <= most:
        return f"it takes {least} to {most} arguments, not {len(node.arguments)}"
    if any(not 0 <= a < k for a in node.arguments):
        return f"arguments {list(node.arguments)} must be earlier nodes"
    if node.dtype not in ITEMSIZE:
        return f"unknown dtype {node.dtype!r}"
    if any(n < 0 for n in node.shape):
        return f"shape {node.shape} has a negative size"
    if node.op not in ("region", "put") and len(node.ints) != _INTS.get(node.op, 0):
        return f"it has {len(node.ints)} attributes, not {_INTS.get(node.op, 0)}"
    arguments = [nodes[a] for a in node.arguments]
    if node.op in BINARY:
        if all(a.op in NUMBERS for a in arguments):
            return "both arguments are numbers"
    elif any(a.op in NUMBERS for a in arguments):
        return "a number cannot stand here"
    return _RULES.get(node.op, _no_rule)(node, arguments)


def _no_rule(node: Node, arguments: list[Node]) -> str:
    if node.op in BINARY:
        return _binary(node, arguments)
    return _unary(node, arguments) if node.op in UNARY else ""


def _number(node: Node, arguments: list[Node]) -> str:
    wanted = "int64" if node.op == "integer" else "float64"
    return "" if (node.dtype, node.shape) == (wanted, ()) else f"a number is a {wanted} of shape ()"


def _same_shape(node: Node, arguments: list[Node]) -> str:
    shape = arguments[0].shape
    return "" if node.shape == shape else f"it gives shape {shape}, not {node.shape}"


def _unary(node: Node, arguments: list[Node]) -> str:
    dtype = arguments[0].dtype
    if node.op not in ("neg", "abs", "square") and _kind(dtype) < 2:
        return f"the type that it makes of {dtype} depends on torch's default"
    return _same_shape(node, arguments) or _typed(node, dtype)


def _binary(node: Node, arguments: list[Node]) -> str:
    dtype = promoted(arguments)
    if not dtype or (node.op == "div" and _kind(dtype) < 2):
        return f"the type that it makes of {[a.dtype for a in arguments]} depends on torch's default"
    shape = broadcast([a.shape for a in arguments])
    if shape is None:
        return f"shapes {[a.shape for a in arguments]} do not go together"
    if node.shape != shape:
        return f"it gives shape {shape}, not {node.shape}"
    return _typed(node, dtype)


def _region(node: Node, arguments: list[Node]) -> str:
    if not len(node.ints) % 2:
        return "its attributes are no offset, sizes and strides"
    offset, shape, stride = view_of(node)
    if min(node.ints) < 0:
        return "an attribute is negative"
    if prod(shape) != prod(node.shape):
        return f"it reads {prod(shape)} elements and gives {prod(node.shape)}"
    nbytes = prod(arguments[0].shape) * ITEMSIZE[arguments[0].dtype]
    if nbytes % ITEMSIZE[node.dtype]:
        return f"{nbytes} bytes are no whole number of {node.dtype}"
    return _inside(offset, shape, stride, nbytes // ITEMSIZE[node.dtype])


def _put(node: Node, arguments: list[Node]) -> str:
    if not len(node.ints) % 2:
        return "its attributes are no offset, sizes and strides"
    offset, shape, stride = view_of(node)
    if min(node.ints) < 0:
        return "an attribute is negative"
    base, value = arguments
    if prod(shape) != prod(value.shape):
        return f"it writes {prod(shape)} elements with {prod(value.shape)}"
    if value.dtype != base.dtype:
        return f"it puts {value.dtype} into {base.dtype}"
    wrong = _same_shape(node, arguments) or _typed(node, base.dtype)
    return wrong or _inside(offset, shape, stride, prod(base.shape))


def _inside(offset: int, shape: Ints, stride: Ints, numel: int) -> str:
    end = span(Region(shape, stride, offset))[1] if prod(shape) else 0
    return "" if end <= numel else f"it leaves its argument: it ends at element {end} of {numel}"


def _cat(node: Node, arguments: list[Node]) -> str:
    dim = node.ints[0]
    first = arguments[0].shape
    if not 0 <= dim < len(first):
        return f"there is no dimension {dim} in {first}"
    for a in arguments:
        if (*a.shape[:dim], *a.shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :]) or len(a.shape) != len(first):
            return f"shapes {first} and {a.shape} do not stand together along dimension {dim}"
        if a.dtype != arguments[0].dtype:
            return f"it joins {arguments[0].dtype} and {a.dtype}"
    shape = (*first[:dim], sum(a.shape[dim] for a in arguments), *first[dim + 1 :])
    if node.shape != shape:
        return f"it gives shape {shape}, not {node.shape}"
    return _typed(node, arguments[0].dtype)


_RULES = {"integer": _number, "real": _number, "convert": _same_shape, "region": _region, "put": _put, "cat": _cat}
_INTS = {"leaf": 1, "integer": 1, "cat": 1}


def _typed(node: Node, dtype: str) -> str:
    return "" if node.dtype == dtype else f"it gives {dtype}, not {node.dtype}"


def _kind(dtype: str) -> int:
    """0 for booleans, 1 integers, 2 reals, 3 complex numbers."""
    if "float" in dtype:
        return 2
    return 0 if dtype == "bool" else 3 if dtype.startswith("complex") else 1


def promoted(arguments: list[Node]) -> str:
    """The element type in which torch computes with these arguments; '' when that depends on its default type."""
    best, scalar = (
        _promote_all([a.dtype for a in arguments if a.op not in NUMBERS and bool(a.shape) == dims])
        for dims in (True, False)
    )
    if not best or (scalar and _kind(scalar) > _kind(best)):
        best = _promote(best, scalar) if best else scalar
    kinds = [2 if a.op == "real" else 1 for a in arguments if a.op in NUMBERS]
    return "" if any(kind > _kind(best) for kind in kinds) else best


def _promote_all(dtypes: list[str]) -> str:
    found = ""
    for dtype in dtypes:
        found = _promote(found, dtype) if found else dtype
    return found


def _promote(a: str, b: str) -> str:
    """torch.promote_types for the types that loaders compute with."""
    if a == b:
        return a
    if _kind(a) != _kind(b):
        return a if _kind(a) > _kind(b) else b
    if {a, b} == {"float16", "bfloat16"}:
        return "float32"
    if ITEMSIZE[a] != ITEMSIZE[b]:
        return a if ITEMSIZE[a] > ITEMSIZE[b] else b
    return max(a, b)  # types of one size that torch does not mix, or mixes into a third: the evaluation compares


def broadcast(shapes: list[Ints]) -> Ints | None:
    """The common shape, None when there is none."""
    rank = max(len(s) for s in shapes)
    out: list[int] = []
    for d in range(rank):
        sizes = {s[d - rank + len(s)] for s in shapes if d - rank + len(s) >= 0} - {1}
        if len(sizes) > 1:
            return None
        out.append(sizes.pop() if sizes else 1)
    return tuple(out)
