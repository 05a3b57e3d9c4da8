"""Element types by name. Names are torch's (`bfloat16`); safetensors headers use their own (`BF16`)."""

from __future__ import annotations

from rdtplan.errors import InputError

ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex64": 8,
}
"""Bytes per element of every dtype a manifest may name."""

SAFETENSORS: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}
"""dtype names of the safetensors header format, as our names."""


def itemsize(dtype: str) -> int:
    """Bytes per element of `dtype`; InputError when the name is unknown."""
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise InputError(f"unknown dtype {dtype!r}", fix=f"use one of {', '.join(sorted(ITEMSIZE))}") from None
