"""How the processes of a sync ended after a fault, and the table that docs/reliability.md shows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from attrs import frozen


@frozen
class Ending:
    """How a command ended in one process."""

    status: str
    """`ok`, `error`, or `dead` when the process died over it."""
    value: Any
    seconds: float
    """From the fault, or from the sync's begin where the fault came first, until this process had ended."""


def table(rows: Iterable[tuple[str, str, dict[str, Ending], str]]) -> str:
    """A Markdown table, a line a fault; the error that came first stands for those that only repeat it."""
    lines = ["| fault | transport | the first error | who says it | all ended after | then |", "|" + " --- |" * 6]
    for fault, transport, endings, recovery in rows:
        errors = sorted((e.seconds, name, str(e.value)) for name, e in endings.items() if e.status == "error")
        _, name, text = errors[0]
        last = max(e.seconds for e in endings.values())
        said = f"{name}, then {len(errors) - 1} more" if len(errors) > 1 else name
        lines.append(f"| {fault} | {transport} | `{_trim(text)}` | {said} | {last:.1f} s | {recovery} |")
    return "\n".join(lines)


def _trim(text: str) -> str:
    first = next((line for line in text.strip().splitlines()[::-1] if re.match(r"RDT\d", line)), text.splitlines()[0])
    first = re.sub(r"/\S*/(listener-)?\S+", "PATH", first).replace("|", "\\|")
    return first if len(first) <= 260 else f"{first[:130]} [...] {first[-120:]}"
