"""JSON Schema of the plan's parts, generated from the attrs classes. `schemas/` holds the result; a test keeps them
equal."""

from __future__ import annotations

import types
import typing
from typing import Any

import attrs

from rdtplan.ir.plan import FORMAT, FleetPlan
from rdtplan.ir.serialize import PART, is_column

_BASIC = {int: "integer", str: "string", bool: "boolean", float: "number", type(None): "null"}


def plan_schema() -> dict[str, Any]:
    """One document: the seal's `plan` object, with every part's class under `$defs`. Unknown fields are allowed (minor
    versions)."""
    definitions: dict[str, Any] = {}
    root = _of_type(FleetPlan, definitions)
    definitions["Part"] = {
        "type": "object",
        "description": "Reference to a line of the file, by index into the seal's `parts`.",
        "properties": {PART: {"type": "integer", "minimum": 0}},
        "required": [PART],
    }
    definitions["Column"] = {
        "type": "object",
        "description": "A long column: a reference to a packed part (docs/plan-format.md). With `of`, the part holds "
        "codes and `of` the values they stand for.",
        "properties": {PART: {"type": "integer", "minimum": 0}, "of": {"type": "array"}},
        "required": [PART],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"rdtplan fleet plan {FORMAT}",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def _of_type(t: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if t in _BASIC:
        # an infinity has no JSON number and is written as a string
        return {"type": [_BASIC[t], "string"]} if t is float else {"type": _BASIC[t]}
    if attrs.has(t):
        if t.__name__ not in definitions:
            definitions[t.__name__] = {}
            definitions[t.__name__] = _of_class(t, definitions)
        return {"$ref": f"#/$defs/{t.__name__}"}
    origin, args = typing.get_origin(t), typing.get_args(t)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return {"type": "array", "items": _of_type(args[0], definitions)}
    if origin is tuple:
        return {
            "type": "array",
            "prefixItems": [_of_type(a, definitions) for a in args],
            "minItems": len(args),
            "maxItems": len(args),
        }
    if origin is types.UnionType or origin is typing.Union:
        return {"anyOf": [_of_type(a, definitions) for a in args]}
    raise TypeError(f"no schema for {t}")


def _of_class(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    attrs.resolve_types(cls)
    properties: dict[str, Any] = {}
    for a in attrs.fields(cls):
        inner = _of_type(a.type, definitions)
        part = {"$ref": "#/$defs/Part", "x-part": inner}
        if a.metadata.get("shared"):
            properties[a.name] = part
        elif a.metadata.get("parts"):
            item = _of_type(a.type.__args__[0], definitions)
            properties[a.name] = {"type": "array", "items": {"$ref": "#/$defs/Part", "x-part": item}}
        elif is_column(a.type):
            properties[a.name] = {"anyOf": [inner, {"$ref": "#/$defs/Column"}]}
        else:
            properties[a.name] = inner
    required = [a.name for a in attrs.fields(cls) if a.default is attrs.NOTHING]
    doc = (cls.__doc__ or "").split("\n\n")[0].strip()
    return {"type": "object", "description": doc, "properties": properties, "required": required}
