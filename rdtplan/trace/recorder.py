"""The recorder: what a weight loader writes, and from where, without a byte being read or written.

Every source tensor is a plain meta tensor. A view shares its root's storage, so at a write the source region is read off the
view itself (`storage_offset`, `shape`, `stride`), whatever view operations led to it, and the destination region off the
destination view. Only writes and non-view operations need to be seen; one TorchFunctionMode sees every call.

The rules, in order of a call:

1. A write into watched memory (a parameter or buffer) is recorded and not executed. Its data must be a region of one source
   (a fetch) or one constant (a fill). Anything else is refused with the source, the chain, the loader and its line.
2. A write into a source tensor itself is refused: later reads would no longer be slices of what the trainer has.
3. An operation on a source that yields new memory (a cast, arithmetic, `cat`) runs on meta; the result is remembered as
   *derived*, and refused where it is written to watched memory.
4. An operation that needs data raises in torch; the error is rethrown with the same four facts.

Writes that reach memory without passing through a Python call cannot be seen here. They cannot pass unnoticed either: the
plan is complete only when every element of every parameter was seen to be written exactly once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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


_GETTERS = {
    getattr(Tensor, n).__get__
    for n in "shape dtype device ndim layout is_meta is_sparse is_quantized is_cuda is_cpu requires_grad grad "
    "itemsize nbytes _version is_leaf".split()
    if hasattr(getattr(Tensor, n, None), "__get__")
} | _functions(
    Tensor,
    "size stride dim numel nelement storage_offset is_contiguous element_size is_floating_point __len__ untyped_storage "
    "data_ptr type_as get_device is_complex is_signed __hash__ __repr__ __format__ ndimension is_shared "
    "_is_view is_pinned requires_grad_",
)
"""Calls that read metadata only."""

_DATA_GET, _DATA_SET = Tensor.data.__get__, Tensor.data.__set__
_VIEWS = {_DATA_GET} | _functions(
    Tensor,
    "narrow chunk split tensor_split unbind select view view_as t transpose permute unsqueeze squeeze expand expand_as "
    "unflatten movedim moveaxis swapaxes swapdims diagonal as_strided unfold split_with_sizes alias detach",
) | _functions(torch, "narrow chunk split unbind select t transpose permute unsqueeze squeeze movedim diagonal")
"""Calls whose result always shares its input's memory."""

_COPY = Tensor.copy_
_GETITEM, _SETITEM = Tensor.__getitem__, Tensor.__setitem__
_ITEM = Tensor.item
_FILL, _ZERO = Tensor.fill_, Tensor.zero_
_ALLOCATORS = _functions(
    torch, "empty_like zeros_like ones_like full_like rand_like randn_like"
) | _functions(Tensor, "new_empty new_zeros new_ones new_full new_tensor new_empty_strided")
"""Calls that take only shape and dtype from a tensor."""


class Recorder(TorchFunctionMode):
    """Records every write of the code that runs inside it.

    `sources[k]` is the k-th source of the manifest as a meta tensor; `watched` the model's memory. After the run, `fetches`
    and `fills` hold rows in load order (see `rdtplan.ir.traces`).
    """

    def __init__(self, manifest: Manifest, sources: Sequence[Tensor], watched: Watched) -> None:
        super().__init__()
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
        self._loader_cache: dict[tuple[Any, int], int] = {}
        self._chain_cache: dict[Any, int] = {}
        for k, tensor in enumerate(sources):
            setattr(tensor, _ORIGIN, (k, ()))

    @property
    def _source_of(self) -> dict[int, int]:
        """Storage -> source, for views that were made where no Python call was seen; made when first needed."""
        if self._source_ids is None:
            self._source_ids = {t.untyped_storage()._cdata: k for k, t in enumerate(self._sources)}
        return self._source_ids

    # -- dispatch ------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _COPY:
            return self._copy(args[0], args[1] if len(args) > 1 else (kwargs or {})["src"])
        if func in _GETTERS:
            return func(*args, **kwargs) if kwargs else func(*args)
        origin = getattr(args[0], _ORIGIN, None) if args else None
        if func in _VIEWS:
            out = func(*args, **kwargs) if kwargs else func(*args)
            if origin is not None:
                _inherit(out, origin, func, args, kwargs)
            return out
        if (func is _GETITEM or func is _ITEM) and origin is None and not args[0].is_meta:
            return func(*args)  # the model's own tables, an expert map say; a source is always on meta
        return self._other(func, args, kwargs or {}, origin)

    def _other(self, func: Any, args: Any, kwargs: dict[str, Any], origin: Any) -> Any:
        name = getattr(func, "__name__", str(func))
        target = kwargs.get("out")
        if target is None and args and isinstance(args[0], Tensor) and _writes(func, name):
            target = args[0]
        if isinstance(target, Tensor):
            handled, out = self._write(func, name, target, args, kwargs)
            if handled:
                return out
        tensors = _tensors(args) + _tensors(tuple(kwargs.values()))
        touched = [t for t in tensors if self._describe(t) is not None]
        if not touched or func in _ALLOCATORS:
            return func(*args, **kwargs)
        try:
            out = func(*args, **kwargs)
        except TraceError:
            raise
        except Exception as error:
            raise self._refuse(
                touched[0], f"calls {name}(), which needs the data: {_first_line(error)}", "RDT201"
            ) from error
        for result in _tensors((out,)):
            storage = result.untyped_storage()._cdata
            if storage in self._source_of:
                source = self._source_of[storage]
                parent = origin[1] if origin is not None and origin[0] == source else ()
                setattr(result, _ORIGIN, (source, (parent, func, args[1:], kwargs, None)))
            elif storage not in self._derived and self.watched.find(result) is None:
                source_k, words = self._describe(touched[0]) or (None, "")
                self._derived[storage] = (result, source_k, f"{words} -> {name}()" if words else f"{name}()")
        return out

    # -- writes --------------------------------------------------------------------------------------------------------

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
        if dest.shape != src.shape and dest.numel() != src.numel():
            raise self._refuse(
                src,
                f"copies {src.numel()} elements of shape {tuple(src.shape)} into {dest.numel()} of shape "
                f"{tuple(dest.shape)} of {self.watched.names[parameter]!r}: a broadcasting copy is not a slice",
                "RDT203",
            )
        if dest.numel() == 0:
            return
        self._check_dtype(dest, parameter, src)
        source, chain = origin
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
        self._check_dtype(dest, parameter, src)
        if self._describe(src) is None and not src.is_meta and src.numel():
            value = src.reshape(-1)[0]
            if bool((src == value).all()) or src.numel() == 1:
                self._fill(dest, parameter, float(value))
                return
        words = (self._describe(src) or (None, "data of its own"))[1]
        raise self._refuse(
            src,
            f"writes {words} into {self.watched.names[parameter]!r}, which is neither a slice of a source nor a constant",
            "RDT202",
        )

    def _fill(self, dest: Tensor, parameter: int, value: float) -> None:
        if dest.numel():
            region = self._region(dest, self.watched.offsets[parameter])
            before = int(all(row[3] != parameter for row in self.fetches))
            self.fills.append((parameter, region, value, before, self._loader()))

    def _copy_elsewhere(self, dest: Tensor, src: Tensor, origin: Any) -> Tensor:
        """A copy into memory that is neither watched nor of a source: scratch of the loader, remembered as derived."""
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

    def _write(
        self, func: Any, name: str, target: Tensor, args: Any, kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """An in-place or `out=` call. (False, None) when it concerns nothing that is watched or derived from a source."""
        parameter = self.watched.find(target)
        if parameter is None:
            if target.untyped_storage()._cdata in self._source_of:
                raise self._refuse(target, f"calls {name}() on the source tensor itself", "RDT204")
            return False, None
        if func == _DATA_SET or name == "set_":
            raise self._refuse(
                args[1] if len(args) > 1 and isinstance(args[1], Tensor) else target,
                f"replaces the memory of {self.watched.names[parameter]!r} ({name})",
                "RDT205",
            )
        if func is _ZERO:
            self._fill(target, parameter, 0.0)
            return True, target
        if func is _FILL and not isinstance(args[1], Tensor):
            self._fill(target, parameter, float(args[1]))
            return True, target
        if func is _SETITEM:
            view, value = target[args[1]], args[2]
            if view.untyped_storage()._cdata != target.untyped_storage()._cdata:
                raise self._refuse(
                    target, f"writes {self.watched.names[parameter]!r} through an index tensor or mask", "RDT202"
                )
            if isinstance(value, Tensor):
                self._copy(view, value)
            else:
                self._fill(view, parameter, float(value))
            return True, None
        raise self._refuse(
            next((t for t in _tensors(args[1:]) if self._describe(t)), target),
            f"changes {self.watched.names[parameter]!r} in place by {name}()",
            "RDT202",
        )

    def _check_dtype(self, dest: Tensor, parameter: int, src: Tensor) -> None:
        if dest.dtype != self.watched.dtypes[parameter]:
            raise self._refuse(
                src,
                f"writes {self.watched.names[parameter]!r} ({self.watched.dtypes[parameter]}) through a view of "
                f"{dest.dtype}",
                "RDT206",
            )

    # -- naming --------------------------------------------------------------------------------------------------------

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
        while "/torch/" in code.co_filename or code.co_filename == __file__:
            if frame.f_back is None:
                break
            frame = frame.f_back
            code = frame.f_code
        key = (code, frame.f_lasti)
        found = self._loader_cache.get(key)
        if found is None:
            text = f"{code.co_qualname} ({_short_path(code.co_filename)}:{frame.f_lineno})"
            found = self._loader_cache[key] = self.loaders.setdefault(text, len(self.loaders))
        return found

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

    def _describe(self, t: Tensor) -> tuple[int | None, str] | None:
        """(source index, words) when `t` holds source data, derived or not, or watched memory; None otherwise."""
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

    def _refuse(self, t: Tensor, what: str, code: str) -> TraceError:
        described = self._describe(t)
        about = described[1] if described else "no source tensor"
        loader = list(self.loaders)[self._loader()]
        return TraceError(
            f"loader {loader} {what}\n  source: {self.current or 'unknown'}\n  chain: {about}",
            fix="this loader cannot be compiled yet; report it with the lines above, or load this model by a full broadcast",
            code=code,
        )


def _writes(func: Any, name: str) -> bool:
    if func is _SETITEM or func == _DATA_SET:
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    return name.endswith("_") and not name.startswith("_")


def _inherit(out: Any, origin: tuple[int, Chain], func: Any, args: Any, kwargs: Any) -> None:
    if isinstance(out, Tensor):
        setattr(out, _ORIGIN, (origin[0], (origin[1], func, args[1:], kwargs, None)))
    else:
        for i, t in enumerate(out):
            setattr(t, _ORIGIN, (origin[0], (origin[1], func, args[1:], kwargs, i)))


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


def _short_path(path: str) -> str:
    """The path from the package on: a plan holds no path of the compiling machine."""
    for marker in ("/site-packages/", "/dist-packages/"):
        if marker in path:
            return path.split(marker, 1)[1]
    return path.rsplit("/", 1)[-1]


