"""Owner classes: distinct owner sets, numbered by first appearance in manifest order.

Names owned by ranks (0, 1), (0, 1), (2,), (0, 1) give classes ((0, 1), (2,)) and the column (0, 0, 1, 0).
A name that nobody owns can never be served and is refused here.
"""

from __future__ import annotations

from attrs import evolve

from rdtplan.errors import PlanError
from rdtplan.ir.manifest import Ints
from rdtplan.ir.topology import Ownership
from rdtplan.passes.draft import Draft


def classify_owners(draft: Draft) -> Draft:
    """Number the owner sets; PlanError RDT301 for an ownerless name, RDT302 for an unknown rank."""
    ids: dict[Ints, int] = {}
    column: list[int] = []
    for name, owners in zip(draft.manifest.names, draft.owners, strict=True):
        if not owners:
            raise PlanError(
                f"no trainer rank owns {name!r}",
                fix="add a pattern to the owners file that matches it",
                code="RDT301",
            )
        if owners[0] < 0 or owners[-1] >= draft.trainer_ranks:
            raise PlanError(
                f"{name!r} is owned by ranks {list(owners)}, but the trainer has ranks 0 to {draft.trainer_ranks - 1}",
                fix="raise --trainer-ranks or mend the owners file",
                code="RDT302",
            )
        column.append(ids.setdefault(owners, len(ids)))
    return evolve(draft, ownership=Ownership(draft.trainer_ranks, tuple(ids), tuple(column)))
