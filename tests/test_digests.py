"""Digests: equal for what means the same, different for every field that matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from plans import Scenario, make_plan

from rdtplan.ir.digests import (
    geometry_digest,
    geometry_rows,
    manifest_digest,
    ownership_digest,
    pair_digests,
    sha256,
)
from rdtplan.ir.manifest import Manifest
from rdtplan.ir.plan import FleetPlan, Program
from rdtplan.ir.topology import InferenceTopology, Ownership

PLAN: FleetPlan = make_plan(
    Scenario(topology=InferenceTopology(tensor_parallel=2), trainer_ranks=3, ownership="pipeline", seed=1)
)
CONSUMER = PLAN.consumers[0]


def put(column: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return column[:at] + (value,) + column[at + 1 :]


def test_sha256_is_of_canonical_bytes() -> None:
    assert sha256({"b": 1, "a": [2]}) == sha256({"a": [2], "b": 1})
    assert sha256({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: evolve(m, names=put(m.names, 3, "another")),
        lambda m: evolve(m, names=m.names[::-1]),
        lambda m: evolve(m, shape_table=put(m.shape_table, 0, (1, 2))),
        lambda m: evolve(m, dtype_table=m.dtype_table[::-1]),
        lambda m: evolve(m, shapes=put(m.shapes, 0, m.shapes[1])),
        lambda m: evolve(m, dtypes=put(m.dtypes, 0, 1)),
    ],
)
def test_the_manifest_digest_is_of_names_dtypes_and_shapes(change: Callable[[Manifest], Manifest]) -> None:
    assert manifest_digest(change(PLAN.manifest)) != manifest_digest(PLAN.manifest)


def test_the_manifest_digest_does_not_depend_on_table_numbers() -> None:
    m = PLAN.manifest
    n = len(m.shape_table)
    renumbered = evolve(m, shape_table=m.shape_table[::-1], shapes=tuple(n - 1 - k for k in m.shapes))
    assert manifest_digest(renumbered) == manifest_digest(m)


@pytest.mark.parametrize(
    "change",
    [
        lambda o: evolve(o, ranks=4),
        lambda o: evolve(o, classes=o.classes[::-1]),
        lambda o: evolve(o, class_of=put(o.class_of, 0, 1)),
    ],
)
def test_the_ownership_digest_is_of_all_of_it(change: Callable[[Ownership], Ownership]) -> None:
    assert ownership_digest(change(PLAN.ownership)) != ownership_digest(PLAN.ownership)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("names", "another.weight"),
        ("kinds", "buffer"),
        ("dtypes", "float64"),
        ("shapes", (7, 7)),
        ("strides", (1, 7)),
        ("aliases", ("tied.weight",)),
    ],
)
def test_the_geometry_digest_is_of_what_a_live_model_shows(column: str, value: Any) -> None:
    p = CONSUMER.program.parameters
    changed = evolve(p, **{column: put(getattr(p, column), 2, value)})
    assert geometry_digest(changed) != geometry_digest(p)
    differing = [k for k, (a, b) in enumerate(zip(geometry_rows(p), geometry_rows(changed), strict=True)) if a != b]
    assert differing == [2]


def pairs(program: Program, manifest: Manifest = PLAN.manifest) -> dict[int, str]:
    return dict(pair_digests(manifest, program, CONSUMER.routing.producer))


def test_pair_digests_are_one_a_producer_ascending() -> None:
    found = pair_digests(PLAN.manifest, CONSUMER.program, CONSUMER.routing.producer)
    ranks = [rank for rank, _ in found]
    assert ranks == sorted(set(CONSUMER.routing.producer)) and len(ranks) == 2
    assert found == CONSUMER.routing.pair_digests


@pytest.mark.parametrize(
    ("table", "column", "step"),
    [
        ("keys", "source", 1),
        ("keys", "region", 1),
        ("keys", "dtype", 1),
        ("keys", "offset", 16),
        ("chunks", "nbytes", 2),
    ],
)
def test_a_pair_digest_is_of_all_that_goes_over_the_wire(table: str, column: str, step: int) -> None:
    """The last chunk's producer is concerned, the others are not."""
    program = CONSUMER.program
    columns = getattr(program, table)
    old = getattr(columns, column)
    changed = evolve(program, **{table: evolve(columns, **{column: (*old[:-1], old[-1] ^ step)})})
    before, after = pairs(program), pairs(changed)
    concerned = CONSUMER.routing.producer[-1]
    assert {rank for rank in before if before[rank] != after[rank]} == {concerned}


def test_a_pair_digest_is_of_names_and_not_of_their_numbers() -> None:
    manifest = evolve(PLAN.manifest, names=put(PLAN.manifest.names, 0, "another"))
    assert pairs(CONSUMER.program, manifest) != pairs(CONSUMER.program)
    program = CONSUMER.program
    n = len(program.regions)
    keys = evolve(program.keys, region=tuple(n - 1 - r for r in program.keys.region))
    assert pairs(evolve(program, regions=program.regions[::-1], keys=keys)) == pairs(program)


def test_a_pair_digest_is_not_of_what_the_worker_does_with_it() -> None:
    """Destinations are the worker's affair: the trainer need not be compiled anew for them."""
    program = CONSUMER.program
    scatters = evolve(program.scatters, parameter=program.scatters.parameter[::-1])
    assert pairs(evolve(program, scatters=scatters)) == pairs(program)
