"""The recorder: what a weight loader writes, and from where, without a byte being read or written.

Every source tensor is a plain meta tensor. A view shares its root's storage, so at a write the source
region is read off the view itself (`storage_offset`, `shape`, `stride`), whatever view operations led to
it, and the destination region off the destination view. Only writes and non-view operations need to be
seen; one TorchFunctionMode sees every call.

The rules, in order of a call:

1. A write into watched memory (a parameter or buffer) is recorded and not executed. Its data must be a
   region of one source (a fetch) or one constant (a fill). Anything else is refused with the source, the
   chain, the loader and its line.
2. A write into a source tensor itself is refused: later reads would no longer be slices of what the trainer
   has.
3. An operation on a source that yields new memory (a cast, arithmetic, `cat`) runs on meta; the result is
   remembered as *derived*, and refused where it is written to watched memory.
4. An operation that needs data is refused, or raises in torch; either way the error has the same four
   facts. Data that a real load would find changed counts too: of a parameter, of a buffer that was written,
   of scratch that holds source data. Tables that the model made for itself (an expert map) may be read.

Writes that reach memory without passing through a Python call cannot be seen here. They cannot pass
unnoticed either: the plan is complete only when every element of every parameter was seen to be written
exactly once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rdtplan.errors import TraceError
from rdtplan.ir.manifest import Manifest
from rdtplan.ir.regions import Region, canonical
from rdtplan.trace.watch import Watched

Tensor = torch.Tensor
Chain = tuple[Any, ...]
"""() for the full tensor, else (parent chain, function, arguments, keyword arguments, output index)."""

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
        self.regions: dict[Region, int] = {}
        self.dtypes: dict[torch.dtype, int] = {}
        self.loaders: dict[str, int] = {}
        self.chains: dict[tuple[str, ...], int] = {(): 0}
        self._raw_regions: dict[Any, int] = {}
        self._sources = sources
        self._source_ids: dict[int, int] | None = None
        self._derived: dict[int, tuple[Tensor, int | None, str]] = {}
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
        if not touched or func in _ALLOCATORS:
            return func(*args, **kwargs)
        if func in _READERS:
            raise self._refuse(touched[0], f"calls {name}(), which needs the data", "RDT201")
        try:
            out = func(*args, **kwargs)
        except TraceError:
            raise
        except Exception as error:
            raise self._refuse(
                touched[0], f"calls {name}(), which needs the data: {_first_line(error)}", "RDT201"
            ) from error
        for result in [*_tensors((out,)), *targets]:
            storage = result.untyped_storage()._cdata
            if storage in self._source_of:
                source = self._source_of[storage]
                parent = origin[1] if origin is not None and origin[0] == source else ()
                setattr(result, _ORIGIN, (source, (parent, func, args[1:], kwargs, None)))
            elif storage not in self._derived and self.watched.find(result) is None:
                source_k, words = self._describe(touched[0]) or (None, "")
                self._derived[storage] = (result, source_k, f"{words} -> {name}()" if words else f"{name}()")
        return out

    # -- writes ----------------------------------------------------------------------------------------------

    def _copy(self, dest: Tensor, src: Tensor) -> Tensor:
        parameter = self.watched.find(dest)
        origin = getattr(src, _ORIGIN, None)
        if origin is None:
            k = self._source_of.get(src.untyped_storage()._cdata)
            origin = None if k is None else (k, ())
        if parameter is None:
            return self._copy_elsewhere(dest, src, origin)
        if origin is None:
            self._store(dest, src, parameter)
            return dest
        self._fetch(dest, src, parameter, origin)
        return dest

    def _fetch(self, dest: Tensor, src: Tensor, parameter: int, origin: Any) -> None:
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

    def _store(self, dest: Tensor, src: Tensor, parameter: int) -> None:
        """A write whose data is no source: a constant is a fill, anything else is refused."""
        if dest.numel() == 0:
            return
        if self._describe(src) is None and not src.is_meta and src.numel():
            value = _constant(src, dest.dtype)
            if value is not None:
                self._fill(dest, parameter, value)
                return
        words = (self._describe(src) or (None, "data of its own"))[1]
        raise self._refuse(
            src,
            f"writes {words} into {self.watched.names[parameter]!r}, which is neither a slice of a source "
            "nor a constant",
            "RDT202",
        )

    def _fill(self, dest: Tensor, parameter: int, value: float) -> None:
        if dest.numel():
            self._check_dtype(dest, parameter, dest)
            if value == value and float(value) != value:
                raise self._refuse(
                    dest,
                    f"fills {self.watched.names[parameter]!r} with {value}, which no float64 holds",
                    "RDT202",
                )
            self._mark_written(parameter)
            region = self._region(dest, self.watched.offsets[parameter])
            before = int(parameter not in self._fetched)
            self.fills.append((parameter, region, float(value), before, self._loader()))

    def _copy_elsewhere(self, dest: Tensor, src: Tensor, origin: Any) -> Tensor:
        """A copy into memory that is neither watched nor of a source: the loader's scratch, now derived."""
        storage = dest.untyped_storage()._cdata
        if storage in self._source_of:
            raise self._refuse(dest, "overwrites the source tensor itself", "RDT204")
        described = self._describe(src)
        if origin is not None:
            described = (origin[0], self._words(origin[0], origin[1]))
        if described is None and storage not in self._derived:
            return _COPY(dest, src)
        source, words = described or (None, "")
        self._derived[storage] = (dest, source, f"{words} -> copy_() into scratch")
        return dest

    def _write(self, func: Any, name: str, target: Tensor, args: Any, kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """An in-place or `out=` call. (False, None) when its target is neither watched nor a source."""
        parameter = self.watched.find(target)
        if parameter is None:
            if target.untyped_storage()._cdata in self._source_of:
                raise self._refuse(target, f"calls {name}() on the source tensor itself", "RDT204")
            return False, None
        blamed = self._blamed((*args, *kwargs.values()), target)
        if func == _DATA_SET:
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
        raise self._refuse(blamed, f"changes {self.watched.names[parameter]!r} in place by {name}()", "RDT202")

    def _check_dtype(self, dest: Tensor, parameter: int, src: Tensor) -> None:
        if dest.dtype != self.watched.dtypes[parameter]:
            raise self._refuse(
                src,
                f"writes {self.watched.names[parameter]!r} ({self.watched.dtypes[parameter]}) through a view "
                f"of {dest.dtype}",
                "RDT206",
            )

    def kept(self, t: Tensor) -> str | None:
        """Words for `t` when it is, or was made of, a source tensor; None otherwise."""
        storage = t.untyped_storage()._cdata
        if storage in self._source_of or storage in self._derived:
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
        if origin is not None:
            return origin[0], self._words(*origin)
        storage = t.untyped_storage()._cdata
        if storage in self._source_of:
            return self._source_of[storage], self.manifest.names[self._source_of[storage]]
        if storage in self._derived:
            _, source, words = self._derived[storage]
            return source, words
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
    """True for torch's code and this file's: not where a loader did what it did."""
    return "/torch/" in code.co_filename or code.co_filename == __file__


def _short_path(path: str) -> str:
    """The path from the package on: a plan holds no path of the compiling machine."""
    for marker in ("/site-packages/", "/dist-packages/"):
        if marker in path:
            return path.split(marker, 1)[1]
    return path.rsplit("/", 1)[-1]
