"""attrs classes to JSON-ready values and back: the one place where cattrs and orjson are set up.

Canonical bytes are orjson with sorted keys and no white space; the same value gives the same bytes on any
machine. Reading is strict: an int column holds ints and nothing that merely converts to one, unknown fields
are ignored (a newer minor version may have added them), a missing or ill-typed field is refused with its
path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import attrs
import cattrs
import orjson
from cattrs import AttributeValidationNote, IterableValidationNote
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from rdtplan.errors import PlanFormatError
from rdtplan.ir import columns

T = TypeVar("T")
PART = "$part"

Store = Callable[[str, Any, Any], int]
"""(name of the field, value, its type) -> index of the part that now holds it."""
Fetch = Callable[[int, Any], Any]
"""(index of a part, type to read it as) -> value."""


def canonical_bytes(value: Any) -> bytes:
    """The one spelling of a JSON-ready value."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _strict(expected: type) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if type(value) is not expected:
            raise TypeError(f"expected {expected.__name__}, found {type(value).__name__} {str(value)[:60]!r}")
        return value

    return structure


def _float_in(value: Any, _: Any) -> float:
    if type(value) in (int, float):
        return float(value)
    if value in ("inf", "-inf", "nan"):
        return float(value)
    raise TypeError(f"expected a number, found {str(value)[:60]!r}")


def _float_out(value: float) -> float | str:
    """JSON has no infinities; a loader may fill with them. An int in a float's place is the same number."""
    return float(value) if math.isfinite(value) else str(float(value))


def _ints_in(value: Any, _: Any) -> tuple[int, ...]:
    if type(value) is not list:
        raise TypeError(f"expected an array of ints, found {type(value).__name__} {str(value)[:60]!r}")
    if not set(map(type, value)) <= {int}:
        at = next(i for i, x in enumerate(value) if type(x) is not int)
        raise TypeError(f"expected int at index {at}, found {str(value[at])[:60]!r}")
    return tuple(value)


def _column_in(column: Any, _: Any) -> tuple[Any, ...]:
    if type(column) is not list or not set(map(type, column)) <= {str}:
        raise TypeError(f"expected an array of strings, found {str(column)[:60]!r}")
    return tuple(column)


class Packed:
    """Type of a part that holds a packed column of integers (`rdtplan.ir.columns`)."""


class Strings:
    """Type of a part that holds a column of strings."""


def is_column(t: Any) -> bool:
    """Columns of a class: the fields that are stored apart when they are long."""
    return t in (tuple[int, ...], tuple[str, ...])


def _column_hooks(name: str, t: Any, store: Store | None, fetch: Fetch | None) -> tuple[Any, Any]:
    """Write and read one column of a class: in place while it is short, else as a part of its own."""
    item, plain_in = (int, _ints_in) if t == tuple[int, ...] else (str, _column_in)

    def out(column: tuple[Any, ...]) -> Any:
        if len(column) < columns.LONG:
            return list(column)
        assert store is not None
        coded = columns.dictionary(column)
        if coded is not None:
            return {PART: store(name, coded[0], Packed), "of": coded[1]}
        return {PART: store(name, column, Packed if item is int else Strings)}

    def back(value: Any, _: Any) -> tuple[Any, ...]:
        if type(value) is not dict:
            return plain_in(value, None)
        if type(value.get(PART)) is not int:
            raise TypeError(f"expected a column or a reference to a part, found {str(value)[:60]!r}")
        assert fetch is not None
        if "of" in value:
            return columns.look_up(fetch(value[PART], Packed), value["of"], item)
        return cast(tuple[Any, ...], fetch(value[PART], Packed if item is int else Strings))

    return out, back


def make_converter(
    *, store: Store | None = None, fetch: Fetch | None = None, detailed: bool = False
) -> cattrs.Converter:
    """A converter for the plan's classes.

    With `store` (or `fetch`), fields marked as shared go to parts of their own and are referred to as
    `{"$part": index}`, and so do long columns; without, values are nested in full. `detailed` makes errors carry the
    path of the bad field, at some cost.
    """
    converter = cattrs.Converter(detailed_validation=detailed)
    for basic in (int, str, bool):
        converter.register_structure_hook(basic, _strict(basic))
    converter.register_structure_hook(float, _float_in)
    converter.register_unstructure_hook(float, _float_out)
    converter.register_structure_hook_func(lambda t: t == tuple[int, ...], _ints_in)
    converter.register_structure_hook_func(lambda t: t == tuple[str, ...], _column_in)
    converter.register_unstructure_hook_func(is_column, lambda column: list(column))
    converter.register_structure_hook(Packed, lambda body, _: columns.unpack(body))
    converter.register_unstructure_hook(Packed, columns.pack)
    converter.register_structure_hook(Strings, _column_in)
    converter.register_unstructure_hook(Strings, list)

    def in_part(name: str, t: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
        def out(value: Any) -> Any:
            assert store is not None
            return {PART: store(name, value, t)}

        def back(value: Any, _: Any) -> Any:
            if type(value) is not dict or type(value.get(PART)) is not int:
                raise TypeError(f"expected a reference to a part, found {str(value)[:60]!r}")
            assert fetch is not None
            return fetch(value[PART], t)

        return out, back

    def in_parts(name: str, item: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
        out, back = in_part(name, item)

        def back_each(values: Any, _: Any) -> Any:
            if type(values) is not list:
                raise TypeError(f"expected an array of references to parts, found {str(values)[:60]!r}")
            return tuple(back(v, None) for v in values)

        return lambda values: [out(v) for v in values], back_each

    def overrides(cls: type) -> dict[str, Any]:
        attrs.resolve_types(cls)  # nothing to do where annotations are no strings, as in the modules of the plan
        found: dict[str, Any] = {}
        for a in attrs.fields(cls):
            if a.metadata.get("shared"):
                out, back = in_part(a.name, a.type)
            elif a.metadata.get("parts"):
                out, back = in_parts(a.name, a.type.__args__[0])
            elif is_column(a.type):
                out, back = _column_hooks(a.name, a.type, store, fetch)
            else:
                continue
            found[a.name] = override(unstruct_hook=out, struct_hook=back)
        return found

    def unstructure_factory(cls: type) -> Callable[[Any], Any]:
        special = overrides(cls) if store else {}
        for a in attrs.fields(cls):
            if a.metadata.get("omitted"):
                hook = special[a.name].unstruct_hook if a.name in special else None
                special[a.name] = override(omit_if_default=True, unstruct_hook=hook)
        return cast(Callable[[Any], Any], make_dict_unstructure_fn(cls, converter, **special))

    def structure_factory(cls: type) -> Callable[[Any, Any], Any]:
        special = overrides(cls) if fetch else {}
        make: Callable[[Any, Any], Any] = make_dict_structure_fn(
            cls, converter, _cattrs_detailed_validation=detailed, **special
        )

        def structure(value: Any, t: Any) -> Any:
            if type(value) is not dict:
                raise TypeError(f"expected an object, found {type(value).__name__} {str(value)[:60]!r}")
            return make(value, t)

        return structure

    converter.register_unstructure_hook_factory(attrs.has, unstructure_factory)
    converter.register_structure_hook_factory(attrs.has, structure_factory)
    return converter


def read(value: Any, cls: type[T], path: str) -> T:
    """Structure a plain nested value; PlanFormatError with the path of the first bad field."""
    try:
        return make_converter(detailed=True).structure(value, cls)
    except Exception as error:
        raise PlanFormatError(f"{path}{first_reason(error, cls.__name__)}", code="RDT404") from None


def first_reason(error: BaseException, class_name: str) -> str:
    """The first complaint of a cattrs error as `.field[3].other: reason`, without the Python around it."""
    path = ""
    while isinstance(error, BaseExceptionGroup):
        inner = error.exceptions[0]
        for note in getattr(inner, "__notes__", ()):
            if isinstance(note, AttributeValidationNote):
                path += f".{note.name}"
            elif isinstance(note, IterableValidationNote):
                path += f"[{note.index}]"
        error = inner
    if isinstance(error, KeyError):
        return f"{path}: required field is missing"
    reason = str(error) or type(error).__name__
    return f"{path}: {reason}" if path else f": {class_name}: {reason}"
