"""Writes that no Python call shows: of scripted functions and C++ extensions, and of code that switches modes off.

The recorder sees calls. A loader that loads a parameter as usual and then rewrites it out of the recorder's sight would
give a plan that is complete and lacks the rewrite. torch's dispatcher sees every operation, whoever calls it, and the
recorder executes no write into watched memory or sources. So one that gets here was not seen, and is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rdtplan.errors import TraceError


class UnseenWrites(TorchDispatchMode):
    """Refuses every operation that reaches torch's dispatcher and writes a tensor that `guarded` has a name for."""

    def __init__(self, guarded: Callable[[torch.Tensor], str | None], place: Callable[[Any], str]) -> None:
        """`place` spells where a frame is."""
        super().__init__()
        self._guarded = guarded
        self._place = place
        self._written: dict[Any, tuple[tuple[int, str], ...]] = {}
        """An operation: positions and names of the arguments that it writes."""
        self.refused: TraceError | None = None
        """The first refusal: a loader may have swallowed it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = self._written.get(func)
        if written is None:
            written = self._written[func] = tuple(
                (i, a.name)
                for i, a in enumerate(func._schema.arguments)
                if a.alias_info is not None and a.alias_info.is_write and func._schema.name != "aten::set_"
            )  # memory that a loader replaces is found after the load
        for i, name in written:
            value = args[i] if i < len(args) else (kwargs or {}).get(name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                guarded = self._guarded(tensor) if isinstance(tensor, torch.Tensor) else None
                if guarded is not None:
                    error = TraceError(
                        f"loader {self._place(sys._getframe(1))} writes {guarded} by {func}, out of sight of Python",
                        fix="this loader cannot be compiled yet; load this model by a full broadcast",
                        code="RDT230",
                    )
                    self.refused = self.refused or error
                    raise error
        with torch._C.DisableTorchFunction():  # the recorder has seen the call, or never will
            return func(*args, **(kwargs or {}))
