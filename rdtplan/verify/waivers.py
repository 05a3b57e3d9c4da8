"""Waivers as users spell them."""

from __future__ import annotations

from rdtplan.errors import InputError
from rdtplan.ir.plan import Waiver
from rdtplan.verify.findings import WAIVABLE


def parse_waiver(text: str) -> Waiver:
    """`CODE:PATTERN`, as `--waive` takes it; InputError RDT108 for anything else."""
    code, _, pattern = text.partition(":")
    if code not in WAIVABLE or not pattern:
        raise InputError(
            f"--waive {text!r}: expected CODE:PATTERN with a code of {', '.join(sorted(WAIVABLE))}", code="RDT108"
        )
    return Waiver(code, pattern)
