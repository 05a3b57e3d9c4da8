"""Findings: what is wrong with a plan, each with a permanent code, a plain sentence and its names."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from attrs import frozen

from rdtplan.errors import PlanError
from rdtplan.ir.plan import Waiver

WAIVABLE = frozenset({"RDT310", "RDT320", "RDT321", "RDT335", "RDT336"})
"""Codes a user may accept by name; the others would move wrong bytes. RDT335 and RDT336 hold for every loader known."""


@frozen(slots=True)
class Finding:
    """One thing that is wrong."""

    code: str
    sentence: str
    names: tuple[str, ...] = ()
    severity: str = "error"

    def __str__(self) -> str:
        return f"{self.code} {self.severity}: {self.sentence}"


def waived(finding: Finding, waivers: Iterable[Waiver]) -> bool:
    """True when every name of the finding is covered by a waiver of its code."""
    if finding.code not in WAIVABLE or not finding.names:
        return False
    patterns = [w.pattern for w in waivers if w.code == finding.code]
    return all(any(fnmatchcase(name, p) for p in patterns) for name in finding.names)


def unwaived(findings: Iterable[Finding], waivers: Iterable[Waiver]) -> list[Finding]:
    """The errors among findings that no waiver accepts: with one of them a plan is unsound."""
    waivers = tuple(waivers)
    return [f for f in findings if f.severity == "error" and not waived(f, waivers)]


def refuse(findings: list[Finding], waivers: Iterable[Waiver] = (), limit: int = 12) -> None:
    """PlanError with all unwaived errors (the first `limit` in words); nothing when there are none."""
    errors = unwaived(findings, waivers)
    if not errors:
        return
    lines = [f"  {f.code} {f.sentence}" for f in errors[:limit]]
    if len(errors) > limit:
        lines.append(f"  ... and {len(errors) - limit} more")
    fixes = {
        "RDT310": "if a parameter is meant to keep its value, accept it with --waive RDT310:PATTERN",
        "RDT320": "if a source name is meant to go nowhere, accept it with --waive RDT320:PATTERN",
        "RDT321": "if part of a source is meant to go nowhere, accept it with --waive RDT321:PATTERN",
        "RDT335": "if the loader does share it out like that, accept it with --waive RDT335:PATTERN",
        "RDT336": "if the loader does place it like that, accept it with --waive RDT336:PATTERN",
    }
    found = [fixes[c] for c in dict.fromkeys(f.code for f in errors) if c in fixes]
    noun = "finding" if len(errors) == 1 else "findings"
    refusal = PlanError(
        f"the plan is not complete, {len(errors)} {noun}:\n" + "\n".join(lines),
        fix="; ".join(found) or "the manifest, the model's config and the layout must fit each other",
        code=errors[0].code,
    )
    refusal.findings = tuple(errors)
    raise refusal
