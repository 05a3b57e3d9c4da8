"""The one error hierarchy of rdtplan and rdtexec.

Every error that a user can meet names the thing, the expected and the actual value, and what to do about it.
`code` is a permanent identifier; `rdtplan/codes.py` holds the entry behind each.
"""

from __future__ import annotations

from typing import Any


class RdtError(Exception):
    """Base of all errors raised on purpose. `fix` says what the user can do."""

    code = "RDT000"

    def __init__(self, message: str, *, fix: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        if code:
            self.code = code

    def __str__(self) -> str:
        text = f"{self.code}: {self.message}"
        return f"{text}\n  what to do: {self.fix}" if self.fix else text

    def __reduce__(self) -> tuple[object, tuple[type[RdtError], str, str, str]]:
        return _rebuild, (type(self), self.message, self.fix, self.code)


def _rebuild(cls: type[RdtError], message: str, fix: str, code: str) -> RdtError:
    """Unpickle an error: it may cross a process boundary on its way to the user."""
    return cls(message, fix=fix, code=code)


class InputError(RdtError):
    """A file, option or description handed to the compiler is wrong."""

    code = "RDT100"


class TraceError(RdtError):
    """A weight loader did something that no plan can express."""

    code = "RDT200"


class PlanError(RdtError):
    """The inputs are well formed but no complete plan exists for them."""

    code = "RDT300"
    findings: tuple[Any, ...] = ()
    """What verification found (`rdtplan.verify.Finding`), where it was verification that refused."""


class PlanFormatError(RdtError):
    """A plan file is truncated, edited, of another version, or not a plan."""

    code = "RDT400"


class PlanMismatch(RdtError):
    """A sound plan does not fit the model, worker or trainer it is used with."""

    code = "RDT500"


class TransferError(RdtError):
    """A sync failed: a peer died, stalled, or broke the protocol."""

    code = "RDT600"
