"""Plan files that were tampered with, and sealed again as if nothing had happened."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from attrs import evolve

from rdtplan.ir.digests import (
    consumer_digest,
    fleet_identity,
    geometry_digest,
    manifest_digest,
    ownership_digest,
    pair_digests,
)
from rdtplan.ir.plan import FleetPlan, Program
from rdtplan.ir.serialize import canonical_bytes

Seal = dict[str, Any]
Parts = list[Any]


def open_up(data: bytes) -> tuple[Seal, Parts]:
    """The seal and the parts of a plan file as plain values."""
    lines = data.split(b"\n")
    return orjson.loads(lines[0]), [orjson.loads(line) for line in lines[1:-1]]


def close_up(seal: Seal, parts: Parts, mend: bool = True) -> bytes:
    """A plan file of these values with digests that fit; without `mend` the seal's sizes stay as they are."""
    bodies = [canonical_bytes(p) for p in parts]
    if mend and isinstance(seal.get("parts"), list):
        for entry, body in zip(seal["parts"], bodies, strict=True):
            if isinstance(entry, dict):
                entry["nbytes"], entry["sha256"] = len(body), hashlib.sha256(body).hexdigest()
    seal.pop("digest", None)
    digest = hashlib.sha256(canonical_bytes(seal)).hexdigest()
    return b"\n".join([canonical_bytes({**seal, "digest": digest}), *bodies, b""])


def forge(data: bytes, path: Path, edit: Callable[[Seal, Parts], None]) -> Path:
    """Write an edited copy of a plan file that is sealed again."""
    seal, parts = open_up(data)
    edit(seal, parts)
    path.write_bytes(close_up(seal, parts))
    return path


def part_index(seal: Seal, kind: str, number: int = 0) -> int:
    """Index of the `number`-th part of a kind."""
    return [i for i, e in enumerate(seal["parts"]) if e["kind"] == kind][number]


def with_program(plan: FleetPlan, **changes: Any) -> FleetPlan:
    """The plan with the first consumer's program changed for all who share it, by values or functions."""
    old = plan.consumers[0].program
    values = {k: v(getattr(old, k)) if callable(v) else v for k, v in changes.items()}
    new: Program = evolve(old, **values)
    consumers = tuple(evolve(c, program=new) if c.program is old else c for c in plan.consumers)
    return evolve(plan, consumers=consumers)


def with_digests(plan: FleetPlan) -> FleetPlan:
    """The plan with all inner digests computed anew, so that only what was tampered with is wrong.

    Digests that cannot be computed any more stay as they are.
    """
    plan = evolve(plan, manifest_digest=_or(plan.manifest_digest, lambda: manifest_digest(plan.manifest)))
    plan = evolve(plan, ownership_digest=_or("", lambda: ownership_digest(plan.ownership)))
    programs: dict[int, Program] = {}
    consumers = []
    for c in plan.consumers:
        if id(c.program) not in programs:
            digest = _or(c.program.geometry_digest, lambda p=c.program: geometry_digest(p.parameters))
            programs[id(c.program)] = evolve(c.program, geometry_digest=digest)
        program = programs[id(c.program)]
        pairs = _or(
            c.routing.pair_digests,
            lambda p=program, r=c.routing: pair_digests(plan.manifest, p, r.producer),
        )
        routing = evolve(c.routing, pair_digests=pairs)
        digest = _or(c.digest, lambda p=program, r=routing: consumer_digest(p, r))
        consumers.append(evolve(c, program=program, routing=routing, digest=digest))
    plan = evolve(plan, consumers=tuple(consumers))
    return evolve(plan, identity=_or(plan.identity, lambda: fleet_identity(plan)))


def _or(value: Any, compute: Callable[[], Any]) -> Any:
    with contextlib.suppress(Exception):
        return compute()
    return value
