"""The recorder: what a weight loader writes, and from where, without a byte being read or written.

Every source tensor is a plain meta tensor. A view shares its root's storage, so at a write the source
region is read off the view itself (`storage_offset`, `shape`, `stride`), whatever view operations led to
it, and the destination region off the destination view. Only writes and non-view operations need to be
seen; one TorchFunctionMode sees every call.

The rules, in order of a call:

1. A write into watched memory (a parameter or buffer) is recorded and not executed. Its data must be a
   region of one source (a fetch), one constant (a fill), or computed from such and from watched memory by
   operations of the closed table (a local operation). Anything else is refused with the source, the chain,
   the loader and its line.
2. A call that yields new memory from a source or from watched memory runs on meta; what it yields is
   remembered by its storage, as a value (`rdtplan/trace/values.py`) when the closed table has an entry for
   the call, else as unknown, and then refused where it is written to watched memory.
3. A write into a source tensor or into such memory changes the value of that storage: later views read the
   new one. The same goes for a loader's scratch.
4. An operation that needs data is refused, or raises in torch; either way the error has the same four
   facts. Data that a real load would find changed counts too: of a parameter, of a buffer that was written,
   of scratch that holds source data. Tables that the model made for itself (an expert map) may be read.
5. Operations are evaluated after all fetches of their module, in record order. So a write into elements that
   an earlier operation has read or written is an operation too, and a value of watched memory that was
   overwritten before its use is refused.

Writes that reach memory without passing through a Python call cannot be seen here. They cannot pass
unnoticed either: the plan is complete only when every element of every parameter was seen to be written
exactly once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from attrs import frozen
from torch.overrides import TorchFunctionMode

from rdtplan.errors import TraceError
from rdtplan.ir.manifest import Manifest
from rdtplan.ir.operations import Expression, flaw
from rdtplan.ir.regions import Region, canonical, overlap
from rdtplan.trace import platform, values
from rdtplan.trace.lowering import CONVERSIONS, CREATORS, IN_PLACE, LOWER, created
from rdtplan.trace.values import Value, flat_region
from rdtplan.trace.watch import Watched

Tensor = torch.Tensor
Chain = tuple[Any, ...]
"""() for the full tensor, else (parent chain, function, arguments, keyword arguments, output index)."""

_UNDERSTOOD = frozenset(LOWER)

_ORIGIN = "_rdt_origin"
"""Attribute of a source tensor or a view of one: (source index, chain)."""


def _functions(owner: Any, names: str) -> set[Any]:
    return {getattr(owner, n) for n in names.split() if hasattr(owner, n)}


def _getters(names: str) -> set[Any]:
    return {f.__get__ for f in _functions(Tensor, names) if hasattr(f, "__get__")}


_GETTERS = _getters(
    "shape dtype device ndim layout is_meta is_sparse is_quantized is_cuda is_cpu requires_grad grad is_leaf "
    "itemsize nbytes _version"
) | _functions(
    Tensor,
    "size stride dim numel nelement storage_offset is_contiguous element_size is_floating_point __len__ "
    "untyped_storage data_ptr get_device is_complex is_signed __hash__ __repr__ __format__ ndimension "
    "is_shared _is_view is_pinned requires_grad_",
)
"""Calls that read metadata only."""

_DATA_GET, _DATA_SET = Tensor.data.__get__, Tensor.data.__set__
_SHARED_VIEWS = "narrow chunk split unbind select t transpose permute unsqueeze squeeze movedim diagonal"
_VIEWS = {
    _DATA_GET,
    *_functions(torch, _SHARED_VIEWS),
    *_functions(
        Tensor,
        f"{_SHARED_VIEWS} tensor_split view view_as expand expand_as unflatten moveaxis swapaxes swapdims "
        "as_strided unfold split_with_sizes alias detach",
    ),
}
"""Calls whose result always shares its input's memory."""

_COPY = Tensor.copy_
_GETITEM, _SETITEM = Tensor.__getitem__, Tensor.__setitem__
_ITEM = Tensor.item
_FILL, _ZERO = Tensor.fill_, Tensor.zero_
_SHARED_READERS = "is_nonzero equal allclose nonzero argwhere masked_select unique unique_consecutive"
_READERS = _functions(torch, _SHARED_READERS) | _functions(
    Tensor,
    f"{_SHARED_READERS} item tolist numpy __bool__ __int__ __float__ __complex__ __index__ __contains__ __array__",
)
"""Calls whose result, or its shape, depends on data. Torch refuses them on meta, not on a live parameter."""
_ALLOCATORS = _functions(torch, "empty_like zeros_like ones_like full_like rand_like randn_like") | _functions(
    Tensor, "new_empty new_zeros new_ones new_full new_tensor new_empty_strided"
)
"""Calls that take only shape and dtype from a tensor."""
_KINDS = {
    **dict.fromkeys(_VIEWS, _VIEWS),
    **dict.fromkeys(_GETTERS, _GETTERS),
    **{f: f for f in (_GETITEM, _COPY, _ITEM)},
}


@frozen(slots=True)
class Derived:
    """Memory that holds something computed: `tensor` keeps it alive."""

    tensor: Tensor
    source: int | None
    """A source that it comes from."""
    words: str
    value: Value | None
    """None: by no operation of the closed table."""


@frozen(slots=True)
class Operand:
    """Temporary memory that a fetch lands in, for an operation of leaf module `module` on watched row `row`."""

    module: int
    row: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@frozen(slots=True)
class RecordedOperation:
    """A write of a computed value."""

    parameter: int
    region: int
    expression: int
    leaves: tuple[tuple[int, int], ...]
    """(row, region); operand k has row -1 - k."""
    loader: int


class Recorder(TorchFunctionMode):
    """Records every write of the code that runs inside it.

    `sources[k]` is the k-th source of the manifest as a meta tensor; `watched` the model's memory. After
    the run, `fetches` and `fills` hold rows in load order (see `rdtplan.ir.traces`).
    """

    def __init__(
        self, manifest: Manifest, sources: Sequence[Tensor], watched: Watched, *, provenance: bool = True
    ) -> None:
        """With `provenance` the op chain of every view is kept beside its region, at some cost in time."""
        super().__init__()
        self._provenance = provenance
        self._kinds = _KINDS if provenance else {**_KINDS, **dict.fromkeys(_VIEWS, _GETTERS)}
        self.manifest = manifest
        self.watched = watched
        self.current = ""
        """The source name that was last handed to the model."""
        self.fetches: list[tuple[int, int, int, int, int, int, int]] = []
        self.fills: list[tuple[int, int, float, int, int]] = []
        self.operations: list[RecordedOperation] = []
        self.operands: dict[tuple[Any, ...], tuple[int, Operand]] = {}
        """(module, source, region, dtype, shape) -> (number, operand)."""
        self.expressions: dict[Expression, int] = {}
        self.regions: dict[Region, int] = {}
        self.dtypes: dict[torch.dtype, int] = {}
        self.loaders: dict[str, int] = {}
        self.chains: dict[tuple[str, ...], int] = {(): 0}
        self._raw_regions: dict[Any, int] = {}
        self._region_list: list[Region] = []
        """The keys of `regions`, as far as somebody asked for them by number."""
        self._sources = sources
        self._source_ids: dict[int, int] | None = None
        self._derived: dict[int, Derived] = {}
        self._fresh: dict[int, Tensor] = {}
        """Storages of the loader's scratch that nobody wrote."""
        self._changed_sources = False
        self._held: dict[int, list[Region]] = {}
        """A watched row: regions that operations have read or written."""
        self._tables: set[int] = set()
        """Storages of watched tables that nobody wrote yet."""
        self._written: set[int] = set()
        self._fetched: set[int] = set()
        self.refused: TraceError | None = None
        """The first refusal: a loader may have swallowed it."""
        self._loader_cache: dict[tuple[int, int], tuple[int, CodeType]] = {}
        """(address of the code, instruction) -> (row, the code, held so that the address stays its own)."""
        self._chain_cache: dict[Any, int] = {}
        if provenance:
            for k, tensor in enumerate(sources):
                setattr(tensor, _ORIGIN, (k, ()))

    @property
    def _source_of(self) -> dict[int, int]:
        """Storage -> source, for views made where no Python call was seen; built when first needed."""
        if self._source_ids is None:
            self._source_ids = {t.untyped_storage()._cdata: k for k, t in enumerate(self._sources)}
        return self._source_ids

    # -- dispatch --------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = self._kinds.get(func)
        if kind is _GETTERS:
            return func(*args, **kwargs) if kwargs else func(*args)
        if kind is _VIEWS or (kind is _GETITEM and _is_basic(args[1])):
            out = func(*args, **kwargs) if kwargs else func(*args)
            origin = getattr(args[0], _ORIGIN, None)
            if origin is not None:
                if type(out) is Tensor:
                    out._rdt_origin = (origin[0], (origin[1], func, args[1:], kwargs, None))
                else:
                    for i, t in enumerate(out):
                        t._rdt_origin = (origin[0], (origin[1], func, args[1:], kwargs, i))
            return out
        if kind is _COPY:
            return self._copy(args[0], args[1] if len(args) > 1 else kwargs["other"])
        if kind is _ITEM and self._is_table(args[0]):
            return func(*args)
        origin = getattr(args[0], _ORIGIN, None) if args else None
        return self._other(func, args, kwargs or {}, origin)

    def _mark_written(self, row: int) -> None:
        self._written.add(row)
        if self._tables and self.watched.kinds[row] == "buffer":
            self._tables.discard(self.watched.tensors[row].untyped_storage()._cdata)

    def _is_table(self, t: Tensor) -> bool:
        """Is `t` a table that the model made for itself, an expert map say? Its data may be read."""
        storage = t.untyped_storage()._cdata
        if storage in self._tables:
            return True
        if t.is_meta or self._unreadable(t):
            return False
        if self.watched.find(t) is not None:
            self._tables.add(storage)
        return True

    def _other(self, func: Any, args: Any, kwargs: dict[str, Any], origin: Any) -> Any:
        name = getattr(func, "__name__", str(func))
        targets = _targets(func, name, args, kwargs)
        for target in targets:
            handled, out = self._write(func, name, target, args, kwargs)
            if handled:
                return out
        tensors = _tensors(args) + _tensors(tuple(kwargs.values()))
        touched = [t for t in tensors if self._unreadable(t)]
        if func in CREATORS:
            return self._create(func, name, args, kwargs)
        if not touched or func in _ALLOCATORS:
            out = func(*args, **kwargs)
            if func in CONVERSIONS and isinstance(out, Tensor) and out.is_meta and not args[0].is_meta:
                args, kwargs, _ = _without_device(args, kwargs)  # a table keeps its data wherever sources lie
                out = func(*args, **kwargs)
            return out
        if func in _READERS:
            raise self._refuse(touched[0], f"calls {name}(), which needs the data", "RDT201")
        try:
            out = self._compute(func, args, kwargs) if func in _UNDERSTOOD else func(*args, **kwargs)
        except TraceError:
            raise
        except Exception as error:
            raise self._refuse(
                touched[0], f"calls {name}(), which needs the data: {_first_line(error)}", "RDT201"
            ) from error
        for result in [*_tensors((out,)), *targets]:
            storage = result.untyped_storage()._cdata
            if storage in self._derived:
                continue
            if storage in self._source_of:
                source = self._source_of[storage]
                parent = origin[1] if origin is not None and origin[0] == source else ()
                setattr(result, _ORIGIN, (source, (parent, func, args[1:], kwargs, None)))
            elif self.watched.find(result) is None:
                value = None
                if result is out:
                    value = self._rows(*args) if func is _GETITEM else self._lower(func, args, kwargs, out)
                self._derive(result, touched[0], f"{name}()", value)
        return out

    def _create(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Fresh memory. What is in it is known on meta too; memory that nobody wrote must not reach the model."""
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            value = created(func, args, kwargs, out)
            if value is not None and value.op == "unset":
                self._fresh[out.untyped_storage()._cdata] = out
            elif out.is_meta:
                self._derived[out.untyped_storage()._cdata] = Derived(out, None, f"{name}()", value)
        return out

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a call of the closed table on meta, whatever memory its arguments have."""
        if func in CONVERSIONS:
            args, kwargs, moved = _without_device(args, kwargs)
            moved = moved or func in (Tensor.cpu, Tensor.cuda)
            if moved and len(args) == 1 and not kwargs:  # the same elements on another device: a copy
                return _standin(args[0]).clone()
        meta_args, meta_kwargs = _on_meta(args), {k: _on_meta(v) for k, v in kwargs.items()}
        out = func(*meta_args, **meta_kwargs)
        storages = {t.untyped_storage()._cdata for t in _tensors((meta_args, tuple(meta_kwargs.values())))}
        if isinstance(out, Tensor) and out.untyped_storage()._cdata in storages:
            return func(*args, **kwargs)  # a view of its argument, which real memory gives as well
        return out

    def _lower(self, func: Any, args: Any, kwargs: dict[str, Any], out: Tensor) -> Value | None:
        """The value of a result in logical order; None when the closed table does not have it."""
        lower = LOWER.get(func)
        if lower is None:
            return None
        if func in CONVERSIONS:
            args, kwargs = args[:1], {}
        operands = [self._operand(a) for a in args]
        named = {k: self._operand(v) for k, v in kwargs.items()}
        if None in operands or any(isinstance(a, list) and None in a for a in operands):
            return None
        return lower(operands, {k: v for k, v in named.items() if v is not None}, out)

    def _rows(self, t: Tensor, index: Any) -> Value | None:
        """Rows of `t` by a table of the model: which experts are a worker's own, say."""
        known = isinstance(index, Tensor) and index.dim() == 1 and index.dtype in (torch.int64, torch.int32)
        if not known or index.is_meta or self._unreadable(index) or not index.numel():
            return None
        value = self._value(t)
        if value is None:
            return None
        count = value.shape[0]
        outside = next((row for row in index.tolist() if not -count <= row < count), None)
        if outside is not None:  # on meta nobody checks
            raise IndexError(f"row {outside} of a tensor with {count} rows")
        rows = [row % count for row in index.tolist()]
        inner, strides = value.shape[1:], values.contiguous_stride(value.shape)
        steps = {b - a for a, b in pairwise(rows)} or {0}
        if len(steps) == 1 and min(steps) >= 0:
            where = canonical((len(rows), *inner), (min(steps) * strides[0], *strides[1:]), rows[0] * strides[0])
            return values.region(value, (len(rows), *inner), where, value.dtype)
        pieces = [
            values.region(value, (1, *inner), canonical(inner, strides[1:], row * strides[0]), value.dtype)
            for row in rows
        ]
        return values.cat(pieces, 0, value.dtype, (len(rows), *inner))

    def _operand(self, argument: Any) -> Any:
        """What a lowering takes for an argument of a call; None for a tensor whose value is not known."""
        if isinstance(argument, Tensor):
            return self._value(argument)
        if type(argument) in (int, float):
            return values.number(argument)
        if isinstance(argument, list | tuple):
            return [self._operand(a) for a in argument]
        return _NO_VALUE if argument is None else argument

    def _value(self, t: Tensor) -> Value | None:
        """What `t` holds now, as a value; None when no expression gives it."""
        if t.is_conj() or t.is_neg():
            return None
        storage = t.untyped_storage()._cdata
        if storage in self._derived:
            value = self._derived[storage].value
            if value is None:
                return None
            return values.region(value, t.shape, canonical(t.shape, t.stride(), t.storage_offset()), t.dtype)
        if storage in self._source_of:
            where = canonical(t.shape, t.stride(), t.storage_offset())
            return Value("source", (), t.dtype, t.shape, row=self._source_of[storage], region=where)
        row = self.watched.find(t)
        if row is not None and self._unreadable(t):
            if t.dtype != self.watched.dtypes[row]:
                return None
            where = canonical(t.shape, t.stride(), t.storage_offset() - self.watched.offsets[row])
            since = (len(self.fetches), len(self.fills), len(self.operations))
            return Value("parameter", (), t.dtype, t.shape, row=row, region=where, since=since)
        if storage in self._fresh:
            return Value("unset", (), t.dtype, t.shape)
        constant = None if t.is_meta or not t.numel() else _constant(t, t.dtype)
        return None if constant is None else values.full(t.dtype, t.shape, constant)

    def _derive(self, result: Tensor, cause: Tensor, step: str, value: Value | None) -> None:
        source, words = self._describe(cause) or (None, "")
        storage = result.untyped_storage()._cdata
        laid_out = None if value is None else _laid_out(value, result)
        self._derived[storage] = Derived(result, source, f"{words} -> {step}" if words else step, laid_out)

    # -- writes ----------------------------------------------------------------------------------------------

    def _copy(self, dest: Tensor, src: Tensor) -> Tensor:
        parameter = self.watched.find(dest)
        origin = getattr(src, _ORIGIN, None)
        if origin is None:
            k = self._source_of.get(src.untyped_storage()._cdata)
            origin = None if k is None else (k, ())
        if self._changed_sources and origin is not None and src.untyped_storage()._cdata in self._derived:
            origin = None
        if parameter is None:
            return self._copy_elsewhere(dest, src)
        if origin is None or parameter in self._held:
            self._store(dest, src, parameter, origin)
            return dest
        self._fetch(dest, src, parameter, origin)
        return dest

    def _fetch(self, dest: Tensor, src: Tensor, parameter: int, origin: Any) -> None:
        self._check_copy(dest, src, parameter)
        if dest.numel() == 0:
            return
        source, chain = origin
        self._mark_written(parameter)
        self._fetched.add(parameter)
        self.fetches.append(
            (
                source,
                self.dtypes.setdefault(src.dtype, len(self.dtypes)),
                self._region(src, 0),
                parameter,
                self._region(dest, self.watched.offsets[parameter]),
                self._loader(),
                self._chain(chain),
            )
        )

    def _check_copy(self, dest: Tensor, src: Tensor, parameter: int) -> None:
        if dest.shape != src.shape and not _fits(src.shape, dest.shape):
            raise self._refuse(
                src,
                f"copies {src.numel()} elements of shape {tuple(src.shape)} into {dest.numel()} of shape "
                f"{tuple(dest.shape)} of {self.watched.names[parameter]!r}: "
                "a broadcasting copy is not a slice",
                "RDT203",
            )
        if dest.numel() == 0:
            return
        self._check_dtype(dest, parameter, src)
        if src.is_conj() or src.is_neg():
            raise self._refuse(
                src, f"writes a conjugated or negated view into {self.watched.names[parameter]!r}", "RDT202"
            )

    def _store(self, dest: Tensor, src: Tensor, parameter: int, origin: Any) -> None:
        """A write whose data is no plain source: a constant is a fill, a value is written as it can be."""
        if dest.numel() == 0:
            return
        if origin is None and self._describe(src) is None and not src.is_meta and src.numel():
            value = _constant(src, dest.dtype)
            if value is not None:
                self._fill(dest, parameter, value)
                return
        described = self._describe(src)
        found = self._value(src) if described is not None else None
        if found is None:
            words = (described or (None, "data of its own"))[1]
            raise self._refuse(
                src,
                f"writes {words} into {self.watched.names[parameter]!r}, which is neither a slice of a source, "
                "nor a constant, nor computed by operations that a plan knows",
                "RDT202",
            )
        self._check_copy(dest, src, parameter)
        assert described is not None
        chain = (
            self._chain(origin[1])
            if origin is not None
            else self.chains.setdefault(_steps(described[1]), len(self.chains))
        )
        self._assign(dest, found, parameter, src, chain)

    def _assign(self, dest: Tensor, value: Value, parameter: int, src: Tensor, chain: int) -> None:
        """Write a value: as fetches and fills where it is made of such, else as an operation."""
        if value.op == "convert" and value.dtype == dest.dtype:
            value = value.arguments[0]  # the copy converts just so
        if value.op == "cat":
            whole = dest.view(value.shape) if dest.dim() != len(value.shape) else dest
            start, dim = 0, value.ints[0]
            for piece in value.arguments:
                self._assign(whole.narrow(dim, start, piece.shape[dim]), piece, parameter, src, chain)
                start += piece.shape[dim]
            return
        where = self._region(dest, self.watched.offsets[parameter])
        if value.op == "full" and self._fill_same(dest, value, parameter):
            return
        if not values.set_everywhere(value):
            raise self._refuse(
                src, f"writes scratch that was never written into {self.watched.names[parameter]!r}", "RDT202"
            )
        if value.op == "source" and not self._is_held(parameter, where):
            self._mark_written(parameter)
            self._fetched.add(parameter)
            self.fetches.append((*self._slice(value), parameter, where, self._loader(), chain))
            return
        self._operate(where, value, parameter, src, chain)

    def _fill_same(self, dest: Tensor, value: Value, parameter: int) -> bool:
        """Fill with a constant tensor's number, when that gives the bytes that a copy gives."""
        constant = _constant(torch.full((1,), value.number, dtype=value.dtype), dest.dtype)
        if constant is not None:
            self._fill(dest, parameter, constant)
        return constant is not None

    def _slice(self, value: Value) -> tuple[int, int, int]:
        """(source, dtype, region) of a leaf that is a slice of a source."""
        assert value.region is not None
        dtype = self.dtypes.setdefault(value.dtype, len(self.dtypes))
        return value.row, dtype, self.regions.setdefault(value.region, len(self.regions))

    def _is_held(self, parameter: int, where: int) -> bool:
        if parameter not in self._held:
            return False
        region = self._region_at(where)
        return any(overlap(region, held) for held in self._held[parameter])

    def _operate(self, where: int, value: Value, parameter: int, blamed: Tensor, chain: int) -> None:
        """Record the evaluation of a value into region `where` of a parameter."""
        name = self.watched.names[parameter]
        module = self.watched.modules[parameter]
        expression = values.expression(value)
        if wrong := flaw(expression):
            raise self._refuse(blamed, f"writes into {name!r} what a plan cannot compute: {wrong}", "RDT202")
        leaves: list[tuple[int, int]] = []
        for leaf in values.leaves_of(value):
            assert leaf.region is not None
            if leaf.op == "source":
                leaves.append(
                    (-1 - self._land(leaf, module, parameter, chain), self._region_row(flat_region(leaf.numel)))
                )
                continue
            read = self.watched.names[leaf.row]
            if self.watched.modules[leaf.row] != module:
                raise self._refuse(
                    blamed,
                    f"computes {name!r} from {read!r}, a parameter of another module, which may not have landed then",
                    "RDT209",
                )
            writes = [
                *((p, r) for *_, p, r, _, _ in self.fetches[leaf.since[0] :]),
                *((p, r) for p, r, *_ in self.fills[leaf.since[1] :]),
                *((o.parameter, o.region) for o in self.operations[leaf.since[2] :]),
            ]
            if any(p == leaf.row and overlap(self._region_at(r), leaf.region) for p, r in writes):
                raise self._refuse(
                    blamed, f"computes {name!r} from values of {read!r} that it has overwritten since", "RDT209"
                )
            leaves.append((leaf.row, self._region_row(leaf.region)))
            self._held.setdefault(leaf.row, []).append(leaf.region)
        self._mark_written(parameter)
        self._held.setdefault(parameter, []).append(self._region_at(where))
        row = self.expressions.setdefault(expression, len(self.expressions))
        self.operations.append(RecordedOperation(parameter, where, row, tuple(leaves), self._loader()))

    def _region_row(self, region: Region) -> int:
        return self.regions.setdefault(region, len(self.regions))

    def _region_at(self, row: int) -> Region:
        if len(self._region_list) < len(self.regions):
            self._region_list += islice(self.regions, len(self._region_list), None)
        return self._region_list[row]

    def _land(self, leaf: Value, module: int, parameter: int, chain: int) -> int:
        """The number of the operand that holds a slice of a source, fetched if it is not yet."""
        key = (module, leaf.row, leaf.region, leaf.dtype, leaf.shape)
        if key not in self.operands:
            number = len(self.operands)
            self.operands[key] = (number, Operand(module, parameter, leaf.dtype, leaf.shape))
            everything = self._region_row(flat_region(leaf.numel))
            self.fetches.append((*self._slice(leaf), -1 - number, everything, self._loader(), chain))
        return self.operands[key][0]

    def _fill(self, dest: Tensor, parameter: int, value: float) -> None:
        if dest.numel():
            self._check_dtype(dest, parameter, dest)
            if value == value and float(value) != value:
                raise self._refuse(
                    dest,
                    f"fills {self.watched.names[parameter]!r} with {value}, which no float64 holds",
                    "RDT202",
                )
            region = self._region(dest, self.watched.offsets[parameter])
            if self._is_held(parameter, region):
                constant = values.full(dest.dtype, dest.shape, value)
                self._operate(region, constant, parameter, dest, 0)
                return
            self._mark_written(parameter)
            before = int(parameter not in self._fetched)
            self.fills.append((parameter, region, float(value), before, self._loader()))

    def _copy_elsewhere(self, dest: Tensor, src: Tensor) -> Tensor:
        """A copy into memory that is not watched: of a source, derived, or the loader's scratch."""
        storage = dest.untyped_storage()._cdata
        described = self._describe(src)
        if described is None and storage not in self._derived and storage not in self._source_of:
            self._fresh.pop(storage, None)
            return _COPY(dest, src)
        self._update(dest, src, self._broadcast(src, dest), "copy_() into scratch")
        return dest

    def _broadcast(self, value: Any, dest: Tensor) -> Value | None:
        """What a copy of `value` (a tensor or a number) into `dest` puts there."""
        if not isinstance(value, Tensor):
            return values.full(dest.dtype, dest.shape, value) if type(value) in (int, float, bool) else None
        found = self._value(value)
        if found is None or value.dim() > dest.dim() or not dest.numel():
            return None
        spread = torch.empty(found.shape, device="meta").expand(dest.shape)
        where = canonical(spread.shape, spread.stride(), 0)
        return values.convert(values.region(found, dest.shape, where, found.dtype), dest.dtype)

    def _update(self, target: Tensor, cause: Tensor, value: Value | None, step: str) -> None:
        """A write into unwatched memory that matters: the value of its storage is another from now on."""
        storage = target.untyped_storage()._cdata
        numel = target.untyped_storage().nbytes() // target.element_size()
        held = self._derived.get(storage)
        if held is not None:
            base = held.value
            keep = held.tensor
        elif storage in self._source_of:
            keep = self._sources[self._source_of[storage]]
            base = self._value(keep)
            self._changed_sources = True
        else:
            keep = target
            flat = target.as_strided((numel,), (1,), 0)
            base = values.full(target.dtype, (numel,), 0.0) if not numel else self._value(flat)
            self._fresh.pop(storage, None)
        where = canonical(target.shape, target.stride(), target.storage_offset())
        if value is not None and where == flat_region(numel) and (base is None or base.op == "unset"):
            base = values.full(target.dtype, (numel,), 0.0)
        if base is not None and (base.dtype != target.dtype or base.numel != numel):
            base = None
        new = values.put(base, value, where) if value is not None else None
        source, words = self._describe(cause) or self._describe(target) or (None, "")
        self._derived[storage] = Derived(keep, source, f"{words} -> {step}" if words else step, new)

    def _write(self, func: Any, name: str, target: Tensor, args: Any, kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """An in-place or `out=` call. (False, None) when its target's data is the loader's own affair."""
        parameter = self.watched.find(target)
        blamed = self._blamed((*args, *kwargs.values()), target)
        if parameter is None:
            return self._write_elsewhere(func, name, target, args, kwargs, blamed)
        if func == _DATA_SET:
            if isinstance(args[1], Tensor) and _same_memory(args[1], target):
                return True, None  # the end of `param.data += 1`
            raise self._refuse(blamed, f"replaces the memory of {self.watched.names[parameter]!r}", "RDT205")
        if func is _ZERO:
            self._fill(target, parameter, 0.0)
            return True, target
        if func is _FILL:
            value = args[1] if len(args) > 1 else kwargs["value"]
            if not isinstance(value, Tensor):
                self._fill(target, parameter, value)
                return True, target
        if func is _SETITEM:
            if _tensors((args[1],)):
                raise self._refuse(
                    blamed,
                    f"writes {self.watched.names[parameter]!r} through an index tensor or mask",
                    "RDT202",
                )
            view, value = target[args[1]], args[2]
            if view.untyped_storage()._cdata != target.untyped_storage()._cdata:
                raise self._refuse(
                    blamed, f"writes {self.watched.names[parameter]!r} through a list of indices", "RDT202"
                )
            if isinstance(value, Tensor):
                while value.dim() > view.dim() and value.shape[0] == 1:  # as torch does when it assigns
                    value = self._other(_GETITEM, (value, 0), {}, getattr(value, _ORIGIN, None))
                self._copy(view, value)
            else:
                self._fill(view, parameter, value)
            return True, None
        result = self._in_place(func, args, kwargs)
        if result is None:
            raise self._refuse(blamed, f"changes {self.watched.names[parameter]!r} in place by {name}()", "RDT202")
        if target.numel():
            self._check_dtype(target, parameter, target)
            chain = self.chains.setdefault((f"{name}()",), len(self.chains))
            self._assign(target, values.convert(result, target.dtype), parameter, blamed, chain)
        return True, target

    def _in_place(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Value | None:
        """What an in-place call of the closed table computes."""
        plain = IN_PLACE.get(func)
        if plain is None:
            return None
        try:
            out = plain(*_on_meta(args), **{k: _on_meta(v) for k, v in kwargs.items()})
        except Exception:
            return None
        if not isinstance(out, Tensor) or out.shape != args[0].shape:
            return None
        return self._lower(plain, args, kwargs, out)

    def _write_elsewhere(
        self, func: Any, name: str, target: Tensor, args: Any, kwargs: dict[str, Any], blamed: Tensor
    ) -> tuple[bool, Any]:
        """A write into memory that is not watched: recorded when source data is on either side."""
        storage = target.untyped_storage()._cdata
        is_source = storage in self._source_of and storage not in self._derived
        if func == _DATA_SET and (storage in self._derived or storage in self._source_of):
            raise self._refuse(target, "replaces the memory of a source tensor", "RDT204")
        others = [t for t in _tensors((*args, *kwargs.values())) if t is not target and self._unreadable(t)]
        if not is_source and storage not in self._derived and not others:
            self._fresh.pop(storage, None)
            return False, None
        if func is _SETITEM and _is_basic(args[1]):
            view, value = target[args[1]], args[2]
            while isinstance(value, Tensor) and value.dim() > view.dim() and value.shape[0] == 1:
                value = self._other(_GETITEM, (value, 0), {}, getattr(value, _ORIGIN, None))
            self._update(view, blamed, self._broadcast(value, view), f"{name}()")
            return True, None
        if func in (_ZERO, _FILL):
            value = 0.0 if func is _ZERO else args[1] if len(args) > 1 else kwargs["value"]
            self._update(target, target, self._broadcast(value, target), f"{name}()")
            return True, target
        result = self._in_place(func, args, kwargs)
        if result is not None:
            self._update(target, blamed, values.convert(result, target.dtype), f"{name}()")
            return True, target
        if is_source:
            raise self._refuse(target, f"calls {name}() on the source tensor itself", "RDT204")
        self._update(target, blamed, None, f"{name}()")
        return (False, None) if target.is_meta and not others else (True, target if func is not _SETITEM else None)

    def _check_dtype(self, dest: Tensor, parameter: int, src: Tensor) -> None:
        if dest.dtype != self.watched.dtypes[parameter]:
            raise self._refuse(
                src,
                f"writes {self.watched.names[parameter]!r} ({self.watched.dtypes[parameter]}) through a view "
                f"of {dest.dtype}",
                "RDT206",
            )

    def guarded(self, t: Tensor) -> str | None:
        """Words for `t` when nothing but a recorded write may change it: watched memory and sources."""
        row = self.watched.find(t)
        if row is not None:
            return repr(self.watched.names[row])
        source = self._source_of.get(t.untyped_storage()._cdata) if t.is_meta else None
        return None if source is None else f"the source {self.manifest.names[source]!r}"

    def kept(self, t: Tensor) -> str | None:
        """Words for `t` when it is, or was made of, a source tensor; None otherwise."""
        storage = t.untyped_storage()._cdata
        if storage in self._source_of or (storage in self._derived and self._derived[storage].words):
            return (self._describe(t) or (None, ""))[1]
        return None

    # -- naming ----------------------------------------------------------------------------------------------

    def _region(self, t: Tensor, base: int) -> int:
        raw = (t.shape, t.stride(), t.storage_offset() - base)
        found = self._raw_regions.get(raw)
        if found is None:
            region = canonical(raw[0], raw[1], raw[2])
            found = self._raw_regions[raw] = self.regions.setdefault(region, len(self.regions))
        return found

    def _loader(self) -> int:
        frame = sys._getframe(3)
        code = frame.f_code
        while is_machinery(code):
            if frame.f_back is None:
                break
            frame = frame.f_back
            code = frame.f_code
        key = (id(code), frame.f_lasti)  # hashing the code itself would walk its constants
        found = self._loader_cache.get(key)
        if found is None:
            row = self.loaders.setdefault(place(code, frame.f_lineno), len(self.loaders))
            found = self._loader_cache[key] = (row, code)
        return found[0]

    def _chain(self, chain: Chain) -> int:
        try:
            found = self._chain_cache.get(chain)
            if found is None:
                words = _chain_words(chain)
                found = self._chain_cache[chain] = self.chains.setdefault(words, len(self.chains))
            return found
        except TypeError:  # an unhashable argument, a list of sizes or an index tensor
            return self.chains.setdefault(_chain_words(chain), len(self.chains))

    def _words(self, source: int, chain: Chain) -> str:
        return ".".join([self.manifest.names[source], *_chain_words(chain)])

    def _unreadable(self, t: Tensor) -> bool:
        """True when `t` does not hold what it would hold in a real load: see rule 4."""
        storage = t.untyped_storage()._cdata
        if storage in self._derived:
            return True
        row = self.watched.find(t)
        if row is not None:
            return row in self._written or self.watched.kinds[row] == "parameter"
        return t.is_meta and storage in self._source_of

    def _describe(self, t: Tensor) -> tuple[int | None, str] | None:
        """(source index, words) of a tensor of source data, derived or not, or of watched memory, or None."""
        origin = getattr(t, _ORIGIN, None)
        storage = t.untyped_storage()._cdata
        if storage in self._derived:
            return self._derived[storage].source, self._derived[storage].words
        if origin is not None:
            return origin[0], self._words(*origin)
        if storage in self._source_of:
            return self._source_of[storage], self.manifest.names[self._source_of[storage]]
        parameter = self.watched.find(t)
        if parameter is not None:
            return None, f"parameter {self.watched.names[parameter]}"
        return None

    def _blamed(self, values: Sequence[Any], otherwise: Tensor) -> Tensor:
        """The first tensor among the arguments of a call that comes from a source."""
        described = ((t, self._describe(t)) for t in _tensors(values))
        return next((t for t, words in described if words and words[0] is not None), otherwise)

    def _refuse(self, t: Tensor, what: str, code: str) -> TraceError:
        described = self._describe(t)
        about = described[1] if described else "no source tensor"
        source = self.current or "unknown"
        if described and described[0] is not None:
            source = self.manifest.names[described[0]]
        row = self._loader()
        loader = list(self.loaders)[row]
        error = TraceError(
            f"loader {loader} {what}\n  source: {source}\n  chain: {about}",
            fix="this loader cannot be compiled yet; report it with the lines above, or load this model by a "
            "full broadcast",
            code=code,
        )
        self.refused = self.refused or error
        return error


class _NoValue:
    """Stands for an argument that is None, where None itself says that a value is not known."""


_NO_VALUE = _NoValue()


def _standin(t: Tensor) -> Tensor:
    """A meta tensor of the same geometry."""
    if t.is_meta:
        return t
    return torch.empty(0, dtype=t.dtype, device="meta").as_strided(t.shape, t.stride(), 0)


def _on_meta(argument: Any) -> Any:
    """An argument of a call with every tensor in it on meta."""
    if isinstance(argument, Tensor):
        return _standin(argument)
    if type(argument) in (list, tuple):
        return type(argument)(_on_meta(a) for a in argument)
    return argument


def _without_device(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], bool]:
    """A conversion without where its result goes; and whether it named a place."""
    rest = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "copy")}
    kept = tuple(a for a in args[1:] if isinstance(a, Tensor | torch.dtype | torch.memory_format))
    moved = len(kept) < len(args) - 1 or len(rest) < len(kwargs)
    return (args[0], *kept), rest, moved


def _laid_out(value: Value, result: Tensor) -> Value | None:
    """A value as its memory holds it: torch keeps a transposed operand's layout, and views are read off memory.

    None when the result is not the value's, or its memory has holes.
    """
    if value.shape != tuple(result.shape) or value.dtype != result.dtype:
        return None
    if result.is_contiguous():
        return value
    order = sorted(range(result.dim()), key=lambda d: -result.stride(d))
    if not result.permute(order).is_contiguous():
        return None
    strides = values.contiguous_stride(value.shape)
    sizes = [value.shape[d] for d in order]
    return values.region(value, sizes, canonical(sizes, (strides[d] for d in order), 0), value.dtype)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Are these two views of the same elements?"""
    same_storage = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same_storage and (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())


def _steps(words: str) -> tuple[str, ...]:
    """Words for computed memory without the name they begin with."""
    return tuple(words.split(" -> ")[1:]) or (words,)


def _targets(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """What a call writes to: its `out=`, the operand of an in-place call, what an operator's schema says."""
    found = _tensors((kwargs.get("out"),))
    overloads = [func] if hasattr(func, "_schema") else [getattr(func, n) for n in getattr(func, "overloads", list)()]
    for overload in overloads:
        for i, argument in enumerate(overload._schema.arguments):
            if argument.is_write:
                found += _tensors((args[i] if i < len(args) else kwargs.get(argument.name),))
    if args and not overloads and _in_place(func, name):
        found += _tensors((args[0],))
    return found


def _in_place(func: Any, name: str) -> bool:
    if func is _SETITEM or func == _DATA_SET:
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    return name.endswith("_") and (not name.startswith("_") or name.startswith("_foreach_"))


def _fits(shape: torch.Size, wanted: torch.Size) -> bool:
    """Does torch copy `shape` into `wanted` without repeating elements? Only leading ones may be missing."""
    return (1,) * (len(wanted) - len(shape)) + tuple(shape) == tuple(wanted)


def _constant(src: Tensor, dtype: torch.dtype) -> float | None:
    """The number whose fill gives the same bytes as copying `src` into memory of `dtype`, if there is one."""
    flat = src.reshape(-1)
    number = float(flat[0])
    try:
        filled = torch.full((flat.numel(),), number, dtype=dtype)
    except RuntimeError:  # a number that does not fit
        return None
    same = torch.equal(flat.to(dtype).view(torch.uint8), filled.view(torch.uint8))
    return number if same else None


def _is_basic(index: Any) -> bool:
    """Does this index give a view, whatever the data?"""
    if type(index) is tuple:
        return all(type(i) in _BASIC for i in index)
    return type(index) in _BASIC


_BASIC = (int, slice, type(None), type(Ellipsis))


def _chain_words(chain: Chain) -> tuple[str, ...]:
    words: list[str] = []
    while chain:
        parent, func, args, kwargs, index = chain
        if func != _DATA_GET:
            given = [_word(a) for a in args] + [f"{k}={_word(v)}" for k, v in (kwargs or {}).items()]
            name = getattr(func, "__name__", str(func))
            text = f"[{', '.join(given)}]" if name == "__getitem__" else f"{name}({', '.join(given)})"
            words.append(text if index is None else f"{text}[{index}]")
        chain = parent
    return tuple(reversed(words))


def _word(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)}"
    if isinstance(value, slice):
        parts = ["" if v is None else str(v) for v in (value.start, value.stop)]
        return ":".join(parts) + (f":{value.step}" if value.step not in (None, 1) else "")
    if isinstance(value, tuple) and any(isinstance(v, slice) or v is Ellipsis for v in value):
        return ", ".join(_word(v) for v in value)
    return "..." if value is Ellipsis else str(value)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _tensors(value)
    return found


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:160]


def place(code: CodeType, line: int) -> str:
    """`function (file:line)`."""
    return f"{code.co_qualname} ({_short_path(code.co_filename)}:{line})"


def is_machinery(code: CodeType) -> bool:
    """True for torch's code and ours around a load: not where a loader did what it did."""
    return "/torch/" in code.co_filename or code.co_filename in _OURS


_OURS = (__file__, platform.__file__)


@functools.cache
def _short_path(path: str) -> str:
    """The path from the outermost package on: a plan holds no path of the compiling machine."""
    file = Path(path)
    root = file.parent
    if not file.is_absolute():  # generated code, named like "<string>"
        return path
    while (root / "__init__.py").is_file():
        root = root.parent
    return file.relative_to(root).as_posix()
