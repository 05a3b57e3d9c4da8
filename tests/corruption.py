"""A seeded corpus of ruined plan files: bytes gone wrong, JSON values moved about, and forgeries sealed again.

Every file it yields must be refused with one clean error, unless it says the same as before in other words: a few of
those that are sealed again do (a default left out, a column read from its copy). The three families:

- *bytes*: flipped, cut off, inserted, removed, overwritten, exchanged, as disks and editors do;
- *values*: JSON values swapped, removed, duplicated, retyped, with the digests left as they were or sealed again;
  sealed again only where the field decides what is moved (`FREE` lists the fields that may say anything);
- *forgeries*: impossible content, with every digest, inner and outer, computed anew.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from attrs import evolve, frozen
from forgery import close_up, open_up, with_digests, with_program
from plans import Scenario, make_plan

from rdtplan.ir import columns
from rdtplan.ir.file import encode
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.regions import Region
from rdtplan.ir.topology import InferenceTopology, TransferSettings

BIG = 10**9

FREE = re.compile(
    r"groups\[\]\.label|program\.(untouched|position)|untouched|provenance\.|scatter_(chain|loader)|fill_loader"
    r"|fills\.(values|before)|values|before|seal\.(compiler|model|notes)|seal\.settings\.max_chunk_bytes"
    r"|seal\.topology\.expert_parallel|regions|(manifest|program)\.(dtype|shape)_table|(parameters\.)?module_names|memory"
)
"""Fields whose forgery may be a plan that is possible: provenance, constants, notes, entries of tables that nothing
uses. Coverage decides about regions, and `memory` is checked with the plan as a whole."""


@frozen
class Ruined:
    """One file of the corpus."""

    family: str
    what: str
    data: bytes


def bases() -> list[FleetPlan]:
    """Small plans that between them have every kind of part."""
    return [
        make_plan(
            Scenario(
                topology=InferenceTopology(tensor_parallel=2, replicas=2),
                settings=TransferSettings(max_chunk_bytes=256, stages_in_flight=2),
                trainer_ranks=4,
                ownership="pipeline",
                seed=1,
            )
        ),
        make_plan(Scenario(topology=InferenceTopology(2, data_parallel=2, expert_parallel=True), trainer_ranks=3)),
    ]


def corpus(count: int, seed: int) -> Iterator[Ruined]:
    """`count` ruined files, the families in turn."""
    dice = random.Random(seed)
    plans = bases()
    whole = [encode(p)[0] for p in plans]
    apart = [_with_columns_apart(p) for p in plans]
    files = [*whole, *apart]
    made = 0
    while made < count:
        family = ("bytes", "values", "forgery")[made % 3]
        if family == "bytes":
            ruined = _ruin_bytes(dice, dice.choice(files))
        elif family == "values":
            ruined = _ruin_values(dice, dice.choice(files))
        else:
            ruined = _forge(dice, dice.choice(plans))
        if ruined is not None and ruined.data not in files:
            made += 1
            yield ruined


def _with_columns_apart(plan: FleetPlan) -> bytes:
    """The plan as a large one is written: with packed columns."""
    before = columns.LONG
    columns.LONG = 8
    try:
        return encode(plan)[0]
    finally:
        columns.LONG = before


# -- bytes -------------------------------------------------------------------------------------------------------


def _ruin_bytes(dice: random.Random, data: bytes) -> Ruined:
    at = dice.randrange(len(data))
    length = min(dice.choice((1, 1, 2, 8, 300, 5000)), len(data) - at)
    other = dice.randrange(len(data))
    kinds: dict[str, Callable[[], bytes]] = {
        "flipped": lambda: data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :],
        "truncated": lambda: data[:at],
        "inserted": lambda: data[:at] + dice.randbytes(length) + data[at:],
        "removed": lambda: data[:at] + data[at + length :],
        "zeroed": lambda: data[:at] + bytes(length) + data[at + length :],
        "copied over": lambda: data[:at] + data[other : other + length] + data[at + length :],
        "punctuation": lambda: data[:at] + dice.choice((b"0", b'"', b"}", b"]", b",", b"\n", b" ")) + data[at + 1 :],
        "digit": lambda: re.sub(rb"\d", lambda m: bytes([48 + (m[0][0] - 47) % 10]), data[at:], count=1),
        "lines swapped": lambda: _swap_lines(dice, data),
    }
    kind = dice.choice(sorted(kinds))
    ruined = kinds[kind]()
    return Ruined("bytes", kind, data[:at] + ruined if kind == "digit" else ruined)


def _swap_lines(dice: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    i, j = dice.randrange(len(lines)), dice.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    return b"\n".join(lines)


# -- values ------------------------------------------------------------------------------------------------------


def leaves(value: Any, label: str) -> Iterator[tuple[str, Any, Any]]:
    """(field, container, key) of every value; key None stands for the container itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        name = f"{label}.{key}" if isinstance(value, dict) else f"{label}[]"
        yield from leaves(inner, name)
        if not isinstance(inner, dict | list):
            yield name, value, key
    if isinstance(value, list) and value:
        yield f"{label} ", value, None


def _ruin_values(dice: random.Random, data: bytes) -> Ruined | None:
    seal, parts = open_up(data)
    sealed_again = dice.random() < 0.7
    k = dice.randrange(-1, len(parts))
    root, kind = (seal["plan"], "seal") if k < 0 else (parts[k], seal["parts"][k]["kind"])
    fields: dict[str, list[tuple[Any, Any]]] = {}
    for name, container, key in leaves(root, kind):
        if not (sealed_again and FREE.match(name)):
            fields.setdefault(name, []).append((container, key))
    if not fields:
        return None
    field = dice.choice(sorted(fields))
    container, key = dice.choice(fields[field])
    what = _change_list(dice, container) if key is None else _change_value(dice, container, key)
    ruined = close_up(seal, parts) if sealed_again else _as_it_was_sealed(data, seal, parts)
    return (
        None
        if ruined == data
        else Ruined("values", f"{what} {field}{', sealed again' if sealed_again else ''}", ruined)
    )


def _as_it_was_sealed(data: bytes, seal: Any, parts: Any) -> bytes:
    """The changed values under the old digests."""
    ruined = close_up(seal, parts, mend=False)
    written, sealed = (open_up(d)[0]["digest"].encode() for d in (ruined, data))
    return ruined.replace(written, sealed, 1)


def _change_list(dice: random.Random, container: list[Any]) -> str:
    at = dice.randrange(len(container))
    kind = dice.choice(("removed from", "duplicated in", "swapped in", "emptied"))
    if kind == "removed from":
        container.pop(at)
    elif kind == "duplicated in":
        container.insert(at, container[at])
    elif kind == "emptied":
        container.clear()
    else:
        other = dice.randrange(len(container))
        container[at], container[other] = container[other], container[at]
    return kind


def _change_value(dice: random.Random, container: Any, key: Any) -> str:
    old = container[key]
    if isinstance(container, dict) and dice.random() < 0.2:
        del container[key]
        return "removed"
    values: list[Any] = [None, True, -1, BIG, 1 << 62, (1 << 64) - 1, 0.5, "x", "", [], {}, [old], {"$part": 0}]
    if type(old) is int:
        values += [old + 1, old - 1, 2 * old + 1, old + 16] * 3
    container[key] = dice.choice(values)
    return "changed"


# -- forgeries -----------------------------------------------------------------------------------------------------


def _forge(dice: random.Random, plan: FleetPlan) -> Ruined | None:
    what = dice.choice(sorted(FORGERIES))
    forged = FORGERIES[what](dice, plan)
    if forged is None or forged == plan:
        return None
    before = columns.LONG
    columns.LONG = dice.choice((8, 256))
    try:
        return Ruined("forgery", what, encode(with_digests(forged))[0])
    except TypeError:  # a value that JSON cannot hold: nobody can write such a file
        return None
    finally:
        columns.LONG = before


Forgery = Callable[[random.Random, FleetPlan], FleetPlan | None]


def _put(column: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*column[:at], value, *column[at + 1 :])


def _index_out_of_range(table: str, name: str) -> Forgery:
    def forge(dice: random.Random, plan: FleetPlan) -> FleetPlan | None:
        column = getattr(getattr(plan.consumers[0].program, table), name)
        if not column:
            return None
        bad = dice.choice((-2, -BIG, BIG, 1 << 62))
        changed = _put(column, dice.randrange(len(column)), bad)
        return with_program(plan, **{table: lambda t: evolve(t, **{name: changed})})

    return forge


def _off_by_some(table: str, name: str) -> Forgery:
    def forge(dice: random.Random, plan: FleetPlan) -> FleetPlan | None:
        column = getattr(getattr(plan.consumers[0].program, table), name)
        at = dice.randrange(len(column))
        changed = _put(column, at, column[at] + dice.choice((-3, -1, 1, 3, 7)))
        return with_program(plan, **{table: lambda t: evolve(t, **{name: changed})})

    return forge


def _shorter(table: str, name: str) -> Forgery:
    def forge(_: random.Random, plan: FleetPlan) -> FleetPlan | None:
        column = getattr(getattr(plan.consumers[0].program, table), name)
        return with_program(plan, **{table: lambda t: evolve(t, **{name: column[:-1]})}) if column else None

    return forge


def _bad_region(dice: random.Random, plan: FleetPlan) -> FleetPlan:
    """A region that is in use becomes one that nothing can be: huge, negative, repeating, of another rank."""
    program = plan.consumers[0].program
    at = dice.choice(program.scatters.region)
    bad = dice.choice(
        (
            Region((1 << 40,), (1,), 0),
            Region((1 << 40,), (0,), 0),
            Region((1 << 31, 1 << 31), (0, 0), 0),
            Region((2, 1 << 40), (1 << 41, 1), 0),
            Region((-1,), (1,), 0),
            Region((4,), (-1,), 8),
            Region((4,), (1,), -4),
            Region((4,), (1, 1), 0),
            Region((4, 1), (1, 1), 0),
            Region((), (), BIG),
        )
    )
    return with_program(plan, regions=_put(program.regions, at, bad))


def _repeating_copy(dice: random.Random, plan: FleetPlan) -> FleetPlan:
    """Source and destination of one write repeat one element: every size fits, and a proof would never end."""
    program = plan.consumers[0].program
    many = dice.choice((1 << 20, 1 << 30, 1 << 40))
    regions = (*program.regions, Region((many,), (0,), 0))
    s = dice.randrange(len(program.scatters))
    k = program.scatters.key[s]
    chunk = next(c for c, end in enumerate(program.chunks.key_end) if k < end)
    size = 2 if program.dtype_table[program.keys.dtype[k]] == "bfloat16" else 4
    last = k == program.chunks.key_end[chunk] - 1
    nbytes = program.keys.offset[k] + many * size if last else program.chunks.nbytes[chunk]
    return with_program(
        plan,
        regions=regions,
        keys=lambda t: evolve(t, region=_put(t.region, k, len(regions) - 1)),
        scatters=lambda t: evolve(t, region=_put(t.region, s, len(regions) - 1)),
        chunks=lambda t: evolve(t, nbytes=_put(t.nbytes, chunk, nbytes)),
    )


def _huge_parameter(dice: random.Random, plan: FleetPlan) -> FleetPlan:
    p = plan.consumers[0].program.parameters
    at = dice.randrange(len(p))
    shape, stride = dice.choice(
        (((1 << 40,), (1,)), ((1 << 40, 2), (3, 1)), ((1 << 20, 1 << 20), (0, 0)), ((-1,), (1,)))
    )
    return with_program(
        plan, parameters=lambda t: evolve(t, shapes=_put(t.shapes, at, shape), strides=_put(t.strides, at, stride))
    )


def _routing(name: str, change: Callable[[random.Random, tuple[Any, ...]], tuple[Any, ...]]) -> Forgery:
    def forge(dice: random.Random, plan: FleetPlan) -> FleetPlan:
        c = plan.consumers[0]
        routing = evolve(c.routing, **{name: change(dice, getattr(c.routing, name))})
        return evolve(plan, consumers=(evolve(c, routing=routing), *plan.consumers[1:]))

    return forge


def _producer(name: str, change: Callable[[random.Random, Any], Any]) -> Forgery:
    def forge(dice: random.Random, plan: FleetPlan) -> FleetPlan:
        p = plan.producers[0]
        return evolve(plan, producers=(evolve(p, **{name: change(dice, getattr(p, name))}), *plan.producers[1:]))

    return forge


def _nested(field: str, name: str, values: tuple[Any, ...]) -> Forgery:
    def forge(dice: random.Random, plan: FleetPlan) -> FleetPlan:
        return evolve(plan, **{field: evolve(getattr(plan, field), **{name: dice.choice(values)})})

    return forge


def _swap(column: tuple[Any, ...], dice: random.Random) -> tuple[Any, ...]:
    i, j = dice.randrange(len(column)), dice.randrange(len(column))
    out = list(column)
    out[i], out[j] = out[j], out[i]
    return tuple(out)


_INDICES = {
    "keys": ("source", "region", "dtype"),
    "scatters": ("key", "parameter", "region"),
    "chunks": ("group", "owner_class"),
    "lifetimes": ("module", "first", "last"),
    "parameters": ("modules",),
    "provenance": ("scatter_loader", "scatter_chain"),
}
FORGERIES: dict[str, Forgery] = {
    **{f"{t}.{n} out of range": _index_out_of_range(t, n) for t, names in _INDICES.items() for n in names},
    **{
        f"{t}.{n} off by some": _off_by_some(t, n)
        for t, n in (
            ("keys", "offset"),
            ("chunks", "nbytes"),
            ("chunks", "key_end"),
            ("chunks", "scatter_end"),
            ("chunks", "stream"),
            ("lifetimes", "first"),
            ("lifetimes", "last"),
        )
    },
    **{
        f"{t}.{n} shorter": _shorter(t, n)
        for t, n in (("keys", "offset"), ("chunks", "nbytes"), ("scatters", "region"), ("parameters", "strides"))
    },
    "region": _bad_region,
    "repeating copy": _repeating_copy,
    "huge parameter": _huge_parameter,
    "routing.producer": _routing("producer", lambda d, c: _put(c, d.randrange(len(c)), d.choice((-1, 99, BIG)))),
    "routing.seq": _routing("seq", lambda d, c: _put(c, d.randrange(len(c)), d.choice((-1, 99, BIG)))),
    "routing.producer shorter": _routing("producer", lambda d, c: c[:-1]),
    "producer.groups": _producer("groups", lambda d, c: _put(c, d.randrange(len(c)), BIG)),
    "producer.signals": _producer("signals", lambda d, c: _put(c, d.randrange(len(c)), d.choice((0, -1, BIG)))),
    "producer.servings": _producer("servings", lambda d, c: d.choice((c[:-1], c + c[:1]))),
    "producer.rank": _producer("rank", lambda d, c: d.choice((-1, 1, BIG))),
    "topology.replicas": _nested("topology", "replicas", (0, -1, 3, BIG, 1 << 62)),
    "topology.tensor_parallel": _nested("topology", "tensor_parallel", (0, -1, 3, BIG, 1 << 62)),
    "settings.num_rdt_buffers": _nested("settings", "num_rdt_buffers", (0, -1)),
    "settings.stages_in_flight": _nested("settings", "stages_in_flight", (0, -1)),
    "settings.buffer_presize_gb": _nested("settings", "buffer_presize_gb", (-1.0, float("inf"), float("nan"))),
    "memory.receive_slot_nbytes": _nested("memory", "receive_slot_nbytes", (0, -1, 1 << 62)),
    "overview.pulls": _nested("overview", "pulls", ((), (0,), (BIG,) * 4)),
    "ownership.classes": _nested("ownership", "classes", ((), ((),), ((1, 0),), ((BIG,),))),
    "ownership.ranks": _nested("ownership", "ranks", (0, -1, 99, 1 << 62)),
    "groups": lambda d, p: evolve(p, groups=_swap(p.groups, d) if d.random() < 0.5 else p.groups[:-1]),
    "manifest.names": lambda d, p: evolve(
        p, manifest=evolve(p.manifest, names=_put(p.manifest.names, 1, p.manifest.names[0]))
    ),
    "manifest.shapes": lambda d, p: evolve(
        p, manifest=evolve(p.manifest, shapes=_put(p.manifest.shapes, 0, d.choice((-1, BIG))))
    ),
    "free_after": lambda d, p: with_program(
        p, free_after=lambda f: _put(f, d.randrange(len(f)), d.choice((-1, -2, BIG)))
    ),
    "consumers": lambda d, p: evolve(p, consumers=d.choice((p.consumers[:-1], p.consumers[::-1], p.consumers[:1] * 4))),
}
