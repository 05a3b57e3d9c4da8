"""Gather groups: which names the trainer gathers, publishes and frees together.

A name is keyed on its *outermost* index segment, so that a mixture-of-experts layer stays whole:

>>> group_key("model.layers.3.mlp.experts.7.w1")
('model.layers', 3)
>>> group_key("visual.blocks.5.attn.qkv.weight")
('visual.blocks', 5)
>>> group_key("model.norm.weight") is None
True

Runs of un-indexed names (embeddings; final norm and head) are groups of their own. Names that share a key
must be contiguous; where they are not, the manifest is reordered (every later name joins its layer's first
appearance) and a note says so, because the trainer then gathers in plan order.
"""

from __future__ import annotations

from attrs import evolve

from rdtplan.ir.manifest import Manifest
from rdtplan.ir.plan import GatherGroup
from rdtplan.passes.draft import Draft

GroupKey = tuple[str, int]


def group_key(name: str) -> GroupKey | None:
    """`(prefix, index)` of the outermost integer segment of a dotted name, None when it has none."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[:i]), int(part)
    return None


def group_names(draft: Draft) -> Draft:
    """Order the manifest into contiguous groups and list them."""
    manifest = draft.manifest
    runs: list[tuple[GroupKey | None, list[int]]] = []
    run_of: dict[GroupKey, int] = {}
    moved: list[str] = []
    for k, name in enumerate(manifest.names):
        key = group_key(name)
        if runs and runs[-1][0] == key:
            runs[-1][1].append(k)
        elif key is not None and key in run_of:
            runs[run_of[key]][1].append(k)
            moved.append(name)
        else:
            if key is not None:
                run_of[key] = len(runs)
            runs.append((key, [k]))
    order = [k for _, members in runs for k in members]
    if moved:
        draft = _reorder(draft, order)
        manifest = draft.manifest
        more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
        draft = evolve(
            draft,
            notes=(
                *draft.notes,
                f"manifest reordered: {moved[0]}{more} stood apart from the other names of its layer; "
                "the trainer gathers in plan order",
            ),
        )
    groups: list[GatherGroup] = []
    group_of: list[int] = []
    at = 0
    for key, members in runs:
        n = len(members)
        nbytes = sum(manifest.nbytes(k) for k in range(at, at + n))
        label = f"{key[0]}.{key[1]}" if key else manifest.names[at]
        groups.append(GatherGroup(label, at, n, nbytes))
        group_of += [len(groups) - 1] * n
        at += n
    return evolve(draft, groups=tuple(groups), group_of=tuple(group_of))


def _reorder(draft: Draft, order: list[int]) -> Draft:
    """Apply a permutation (new position -> old index) to the manifest, its owners and every trace."""
    old = draft.manifest
    new_of = [0] * len(order)
    for new, k in enumerate(order):
        new_of[k] = new
    manifest = Manifest(
        tuple(old.names[k] for k in order),
        old.dtype_table,
        old.shape_table,
        tuple(old.dtypes[k] for k in order),
        tuple(old.shapes[k] for k in order),
    )
    programs = tuple(
        evolve(
            p,
            trace=evolve(
                p.trace,
                fetches=evolve(p.trace.fetches, sources=tuple(new_of[k] for k in p.trace.fetches.sources)),
            ),
        )
        for p in draft.programs
    )
    return evolve(draft, manifest=manifest, owners=tuple(draft.owners[k] for k in order), programs=programs)
