"""The manifest: every source name of the trainer's checkpoint, in order, with dtype, full shape and owners.

Stored as columns: a 235B mixture of experts has 36,945 names, and a worker loads its plan in milliseconds.
"""

from collections.abc import Iterable
from functools import cached_property
from math import prod
from operator import mul

from attrs import frozen

from rdtplan.errors import InputError
from rdtplan.ir.dtypes import ITEMSIZE, itemsize

Ints = tuple[int, ...]


@frozen(slots=True, order=True)
class Piece:
    """A box of a tensor, and the trainer ranks that hold it."""

    offsets: Ints
    """First index in every dimension."""
    sizes: Ints
    ranks: Ints

    @property
    def numel(self) -> int:
        return prod(self.sizes)


@frozen(slots=True)
class SourceTensor:
    """One manifest entry as inputs give it. `owners` are trainer ranks, None when the entry does not say."""

    name: str
    dtype: str
    shape: Ints
    owners: Ints | None = None
    pieces: tuple[Piece, ...] = ()
    """Boxes in which the tensor is held; empty: its owners have all of it."""


@frozen(slots=True)
class Manifest:
    """The whole model, identical on every trainer rank. Column k describes the k-th source name."""

    names: tuple[str, ...]
    dtype_table: tuple[str, ...]
    shape_table: tuple[Ints, ...]
    dtypes: Ints
    """Index into `dtype_table`, a name."""
    shapes: Ints
    """Index into `shape_table`, a name."""

    def __len__(self) -> int:
        return len(self.names)

    def dtype(self, k: int) -> str:
        return self.dtype_table[self.dtypes[k]]

    def shape(self, k: int) -> Ints:
        return self.shape_table[self.shapes[k]]

    def nbytes(self, k: int) -> int:
        """Bytes of the full tensor."""
        return prod(self.shape(k)) * itemsize(self.dtype(k))

    @cached_property
    def nbytes_column(self) -> Ints:
        """Bytes of every full tensor."""
        sizes, numels = list(map(itemsize, self.dtype_table)), list(map(prod, self.shape_table))
        return tuple(map(mul, map(sizes.__getitem__, self.dtypes), map(numels.__getitem__, self.shapes)))


def build_manifest(entries: Iterable[SourceTensor]) -> Manifest:
    """Columns of `entries`, in order.

    InputError RDT106 on a duplicate name, RDT104 on an unknown dtype, a negative size or a name that is no
    text, RDT105 when there is no entry.
    """
    names: list[str] = []
    dtypes: list[int] = []
    shapes: list[int] = []
    dtype_ids: dict[str, int] = {}
    shape_ids: dict[Ints, int] = {}
    seen: dict[str, int] = {}
    for entry in entries:
        if entry.name in seen:
            raise InputError(
                f"manifest: source name {entry.name!r} stands at entries {seen[entry.name]} and {len(names)}",
                fix="give every source name once",
                code="RDT106",
            )
        wrong = _wrong(entry)
        if wrong:
            raise InputError(f"manifest: {entry.name!r} {wrong}", code="RDT104")
        seen[entry.name] = len(names)
        names.append(entry.name)
        dtypes.append(dtype_ids.setdefault(entry.dtype, len(dtype_ids)))
        shapes.append(shape_ids.setdefault(tuple(entry.shape), len(shape_ids)))
    if not names:
        raise InputError(
            "manifest: it names no tensor",
            fix="point at a checkpoint or a non-empty JSON manifest",
            code="RDT105",
        )
    return Manifest(tuple(names), tuple(dtype_ids), tuple(shape_ids), tuple(dtypes), tuple(shapes))


def _wrong(entry: SourceTensor) -> str:
    """What no manifest may hold, '' when all is well."""
    if any(n < 0 for n in entry.shape):
        return f"has shape {list(entry.shape)} with a negative size"
    if entry.dtype not in ITEMSIZE:
        return f"has dtype {entry.dtype!r}, which is none of {', '.join(sorted(ITEMSIZE))}"
    try:
        entry.name.encode()
    except UnicodeEncodeError:
        return "is not a name that UTF-8 can spell"
    return ""
