"""Digests: SHA-256 over canonical bytes of what two sides must agree on.

The live side (a worker's model, a trainer's manifest) computes the same digest from what it really has; when
it differs, the rows themselves are compared to name the first field that does.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import cattrs
import orjson

from rdtplan.ir.manifest import Manifest
from rdtplan.ir.plan import FleetPlan, Program, Routing
from rdtplan.ir.serialize import canonical_bytes, make_converter
from rdtplan.ir.topology import Ownership
from rdtplan.ir.traces import Parameters

PAIR = "1.0"
"""Version of what a pair digest covers. Not the file's: a newer minor version of that changes no digest of a plan."""


def sha256(value: Any) -> str:
    """Hex digest of the canonical bytes of a JSON-ready value."""
    return hashlib.sha256(canonical_bytes(value)).hexdigest()


def manifest_digest(manifest: Manifest) -> str:
    """Over names, dtypes and full shapes in plan order."""
    rows = [[n, manifest.dtype(k), list(manifest.shape(k))] for k, n in enumerate(manifest.names)]
    return sha256(rows)


def ownership_digest(ownership: Ownership) -> str:
    """Over the owner sets and the owner class of every name."""
    return sha256([ownership.ranks, [list(c) for c in ownership.classes], list(ownership.class_of)])


def geometry_rows(parameters: Parameters) -> list[list[Any]]:
    """One row a parameter: name, kind, dtype, shape, stride, aliases. What a live model is compared with.

    Operands are left out: a live model has none.
    """
    return [
        [name, kind, dtype, list(shape), list(stride), list(aliases)]
        for name, kind, dtype, shape, stride, aliases in zip(
            parameters.names,
            parameters.kinds,
            parameters.dtypes,
            parameters.shapes,
            parameters.strides,
            parameters.aliases,
            strict=True,
        )
        if kind != "operand"
    ]


def geometry_digest(parameters: Parameters) -> str:
    """Over `geometry_rows`, in name order: a reload may list a module's tensors in another order."""
    return sha256(sorted(geometry_rows(parameters)))


def pair_digests(manifest: Manifest, program: Program, producers: tuple[int, ...]) -> tuple[tuple[int, str], ...]:
    """One digest a producer: its chunks in sequence, with the names, dtypes, regions and offsets of their keys.

    Written with values and not with table indices, so that it is the same however the tables are numbered.
    """
    # A fragment is JSON that is spelled already; layers and experts use the same few regions over and over.
    regions = [orjson.Fragment(canonical_bytes([r.shape, r.stride, r.offset])) for r in program.regions]
    rows: dict[int, list[Any]] = {}
    keys, chunks = program.keys, program.chunks
    start = 0
    for chunk, producer in enumerate(producers):
        end = chunks.key_end[chunk]
        names = list(map(manifest.names.__getitem__, keys.source[start:end]))
        dtypes = list(map(program.dtype_table.__getitem__, keys.dtype[start:end]))
        slices = list(map(regions.__getitem__, keys.region[start:end]))
        rows.setdefault(producer, []).append([chunks.nbytes[chunk], names, dtypes, slices, keys.offset[start:end]])
        start = end
    return tuple((p, sha256([PAIR, rows[p]])) for p in sorted(rows))


@functools.cache
def _converter() -> cattrs.Converter:
    return make_converter()


def consumer_digest(program: Program, routing: Routing) -> str:
    """Over everything that one worker executes; not over where its writes came from, or why it leaves what it does."""
    converter = _converter()
    plain = converter.unstructure(program)
    del plain["provenance"], plain["untouched_reasons"]
    if "experts" in plain:
        del plain["experts"]["initial"]
    return sha256([plain, converter.unstructure(routing)])


def fleet_identity(plan: FleetPlan) -> str:
    """See `FleetPlan.identity`; the plan's own field is not looked at."""
    converter = _converter()
    deciding = [converter.unstructure(part) for part in (plan.model, plan.topology, plan.settings)]
    consumers = [[c.consumer_id, c.digest] for c in plan.consumers]
    return sha256([plan.compiler.target, plan.manifest_digest, plan.ownership_digest, deciding, consumers])
