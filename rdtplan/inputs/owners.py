"""The owners file: which trainer ranks hold which names, as patterns.

TOML. Each rule maps a shell pattern over source names to ranks; the first rule that matches a name wins:

    [[own]]
    names = "model.layers.[0-3].*"     # * matches anything, dots included
    ranks = [0, 1]

    [[own]]
    layers = "4-7"                     # layer indices (the outermost index of a name), ranges and lists
    ranks = [2, 3]

    [[own]]
    names = ["model.embed_tokens.*", "lm_head.*", "model.norm.*"]
    ranks = "all"

    [[own]]
    names = "*"
    ranks = "all"
    shard = 0                          # held in pieces: cut along this dimension over the ranks, as FSDP2 cuts

A rule with both `names` and `layers` needs both to match. Without an owners file every rank owns everything. Ranks of a
rule with `shard` are in the order of the pieces; tensors without dimensions stay whole.
"""

from __future__ import annotations

import os
import re
import tomllib
from fnmatch import translate
from pathlib import Path
from typing import Any

from attrs import frozen

from rdtplan.errors import InputError
from rdtplan.ir.manifest import Ints, Piece, SourceTensor
from rdtplan.ir.pieces import chunked, untiled
from rdtplan.passes.group_names import group_key

MAX_LAYERS = 1 << 20
"""Layer indices are below this; it keeps a mistyped range from filling the memory."""


@frozen
class OwnerRule:
    """One `[[own]]` table."""

    patterns: tuple[re.Pattern[str], ...]
    """Empty: any name."""
    layers: frozenset[int] | None
    ranks: Ints
    """Ascending, or with `shard` in the order of the pieces."""
    shard: int | None = None
    """Dimension along which the ranks hold pieces; None: each has all of it."""

    def matches(self, name: str) -> bool:
        if self.layers is not None:
            key = group_key(name)
            if key is None or key[1] not in self.layers:
                return False
        return not self.patterns or any(p.match(name) for p in self.patterns)


def read_owner_rules(path: str | os.PathLike[str], trainer_ranks: int) -> tuple[OwnerRule, ...]:
    """Parse an owners file; InputError RDT107 names the rule and key that is wrong."""
    try:
        data = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"owners file {path} cannot be read: {error.strerror}", code="RDT107") from None
    except ValueError as error:  # TOML errors, and bytes that are not UTF-8
        raise InputError(f"owners file {path} is not TOML: {error}", code="RDT107") from None
    tables = data.get("own")
    if not isinstance(tables, list) or not tables or set(data) != {"own"} or not all(map(_is_table, tables)):
        raise InputError(
            f"owners file {path}: expected only [[own]] tables, found {', '.join(sorted(data)) or 'nothing'}",
            fix="write one [[own]] table a rule, with `ranks` and `names` or `layers`",
            code="RDT107",
        )
    return tuple(_rule(table, f"{path}: [[own]] number {i + 1}", trainer_ranks) for i, table in enumerate(tables))


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _rule(table: Any, where: str, trainer_ranks: int) -> OwnerRule:
    unknown = sorted(set(table) - {"names", "layers", "ranks", "shard"})
    if unknown:
        raise InputError(f"{where}: unknown key {unknown[0]!r}; keys are names, layers, ranks, shard", code="RDT107")
    shard = table.get("shard")
    if shard is not None and (type(shard) is not int or shard < 0):
        raise InputError(f"{where}: shard: expected a dimension, 0 or more, found {shard!r}", code="RDT107")
    names = table.get("names", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise InputError(f"{where}: names: expected a pattern or a list of patterns, found {names!r}", code="RDT107")
    ranks = table.get("ranks")
    if ranks == "all":
        ranks = list(range(trainer_ranks))
    if not isinstance(ranks, list) or not ranks or not all(type(r) is int for r in ranks):
        raise InputError(f'{where}: ranks: expected a list of ranks or "all", found {ranks!r}', code="RDT107")
    outside = [r for r in ranks if not 0 <= r < trainer_ranks]
    if outside:
        raise InputError(
            f"{where}: rank {outside[0]} does not exist, the trainer has ranks 0 to {trainer_ranks - 1}",
            code="RDT107",
        )
    layers = _layers(table["layers"], where) if "layers" in table else None
    if not names and layers is None:
        raise InputError(f"{where}: it matches nothing; give names or layers", code="RDT107")
    if shard is not None and len(set(ranks)) < len(ranks):
        raise InputError(f"{where}: ranks: {ranks} names a rank twice, each holds one piece", code="RDT107")
    held = tuple(ranks) if shard is not None else tuple(sorted(set(ranks)))
    return OwnerRule(tuple(re.compile(translate(n)) for n in names), layers, held, shard)


def _layers(value: Any, where: str) -> frozenset[int]:
    parts = value if isinstance(value, list) else value.split(",") if isinstance(value, str) else [value]
    found: set[int] = set()
    for part in parts or [None]:
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(part), re.ASCII)
        lo, hi = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if type(part) not in (int, str) or not lo <= hi < MAX_LAYERS:
            raise InputError(f'{where}: layers: expected "0-3,8" or a list of layers, found {value!r}', code="RDT107")
        found.update(range(lo, hi + 1))
    return frozenset(found)


def resolve_owners(
    entries: list[SourceTensor], rules: tuple[OwnerRule, ...] | None, trainer_ranks: int
) -> tuple[Ints, ...]:
    """Owners of every entry: its own, else the first matching rule's, else none; without rules all ranks."""
    everyone = tuple(range(trainer_ranks))
    owners: list[Ints] = []
    for entry in entries:
        if entry.pieces:
            owners.append(tuple(sorted({r for piece in entry.pieces for r in piece.ranks})))
        elif entry.owners is not None:
            owners.append(tuple(sorted(set(entry.owners))))
        elif rules is None:
            owners.append(everyone)
        else:
            rule = _rule_of(entry, rules)
            owners.append(tuple(sorted(rule.ranks)) if rule else ())
    return tuple(owners)


def resolve_pieces(
    entries: list[SourceTensor], rules: tuple[OwnerRule, ...] | None, trainer_ranks: int
) -> tuple[tuple[Piece, ...], ...]:
    """Pieces of every entry: its own, else those of the first matching rule; none where it is held whole.

    InputError RDT107 names an entry whose pieces do not tile it or are of ranks that do not exist.
    """
    found: list[tuple[Piece, ...]] = []
    for entry in entries:
        pieces = entry.pieces
        if not pieces and entry.owners is None and rules is not None:
            rule = _rule_of(entry, rules)
            if rule is not None and rule.shard is not None and entry.shape:
                if rule.shard >= len(entry.shape):
                    raise InputError(
                        f"owners: {entry.name!r} has shape {entry.shape}, it cannot be sharded along {rule.shard}",
                        fix="let an earlier rule match this name",
                        code="RDT107",
                    )
                pieces = chunked(entry.shape, rule.shard, rule.ranks)
        wrong = untiled(entry.shape, pieces) if pieces else ""
        outside = [r for piece in pieces for r in piece.ranks if not 0 <= r < trainer_ranks]
        if outside:
            wrong = f"rank {outside[0]} does not exist, the trainer has ranks 0 to {trainer_ranks - 1}"
        if wrong:
            raise InputError(
                f"the pieces of {entry.name!r} {entry.shape} are no tiling: {wrong}",
                fix="give pieces that hold every element once",
                code="RDT107",
            )
        found.append(pieces)
    return tuple(found) if any(found) else ()


def _rule_of(entry: SourceTensor, rules: tuple[OwnerRule, ...]) -> OwnerRule | None:
    return next((rule for rule in rules if rule.matches(entry.name)), None)
