"""Calls that may never return: of the inference side, whose workers may be stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rdtplan.errors import TransferError


class Call:
    """A call under way, in a daemon thread: one that hangs keeps neither the caller nor the end of the process."""

    def __init__(
        self, what: str, call: Callable[[], Any], *, failed: Callable[[BaseException], None] = lambda _: None
    ) -> None:
        """Starts it. `what` is it in words; `failed` gets, in that thread, the error that it ends with."""
        self._what, self._call, self._failed = what, call, failed
        self._value: Any = None
        self.error: BaseException | None = None
        """What it has ended with."""
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"rdtexec-{what}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self.error = error
            self._failed(error)

    def ended(self, within_s: float | None) -> bool:
        """Has it ended, `within_s` seconds from now? None: however long it takes."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def result(self, within_s: float | None) -> Any:
        """What it returns, or raises; TransferError RDT602 when it has not ended `within_s` seconds from now."""
        if not self.ended(within_s):
            raise TransferError(
                f"{self._what} has not returned for {time.monotonic() - self._began:.1f} s",
                fix="look at the inference server: whether one of its workers is stopped",
                code="RDT602",
            )
        if self.error is not None:
            raise self.error
        return self._value
