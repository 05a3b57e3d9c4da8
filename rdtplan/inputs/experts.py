"""Placements of experts as a file has them, and as vLLM's workers give them: JSON.

Either one row for all layers, the logical expert of every slot, or an object of such rows by leaf module:

    {"model.layers.3.mlp.experts.routed_experts": [0, 1, 2, 3, 1, 0], ...}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rdtplan.errors import InputError
from rdtplan.ir.experts import Placement


def read_placement(path: str | os.PathLike[str]) -> Placement:
    """The placement in a JSON file. InputError RDT120 when there is none in it; whether it fits, the model says."""
    try:
        value = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise _wrong(f"{path} cannot be read: {error}") from None
    return check_placement(value, f"{path}")


def check_placement(value: Any, where: str) -> Placement:
    """A placement as tuples. InputError RDT120 when it is none."""
    if isinstance(value, Mapping):
        return {layer: _row(row, f"{where}: layer {layer!r}") for layer, row in value.items()}
    return _row(value, where)


def _row(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong(f"{where}: expected a list of experts, found {type(value).__name__} {str(value)[:60]}")
    for slot, expert in enumerate(value):
        if type(expert) is not int:
            raise _wrong(f"{where}: expected the number of an expert in slot {slot}, found {expert!r}")
    return tuple(value)


def _wrong(what: str) -> InputError:
    fix = "give one list of experts by slot for all layers, or an object of such lists by layer"
    return InputError(what, fix=fix, code="RDT120")
