"""The alarm for a sync that sends what the last one sent: nothing was trained, or the wrong tensors are published.

A few elements of every tensor, evenly spaced, are kept from one sync to the next and compared. It costs one small copy
a group; an optimizer step that changes none of them in a whole rank has as good as not happened.
"""

from __future__ import annotations

import torch

ELEMENTS = 64
"""Most elements sampled of one tensor."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MODES = ("warn", "fail", "ignore")


class PayloadSample:
    """Compares what a rank publishes in one sync with what it published in the last."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The last sync failed: what it sent is nothing to compare with."""
        self._last: dict[tuple[int, int], torch.Tensor] = {}
        self.start()

    def start(self) -> None:
        """A sync begins."""
        self.compared = 0
        """Elements compared so far."""
        self.changed = False
        """Has any of them changed?"""

    def add(self, group: int, tensors: dict[int, torch.Tensor]) -> None:
        """Look at one gathered group; its tensors are contiguous."""
        by_width: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors.values():
            if tensor.numel():
                by_width.setdefault(tensor.element_size(), []).append(_sample(tensor))
        for width, samples in by_width.items():
            sizes = [s.numel() for s in samples]
            now = torch.empty(sum(sizes), dtype=INTEGERS[width], device=samples[0].device)
            torch._foreach_copy_(list(now.split(sizes)), samples)
            last = self._last.get((group, width))
            if last is not None and last.numel() == now.numel():
                self.compared += now.numel()
                self.changed = self.changed or not torch.equal(last, now)
            self._last[group, width] = now

    @property
    def identical(self) -> bool:
        """Was there something to compare with, and did nothing change?"""
        return self.compared > 0 and not self.changed


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """At most `ELEMENTS` evenly spaced elements of a contiguous tensor, as integers so that a NaN equals itself."""
    count = min(ELEMENTS, tensor.numel())
    raw = tensor.detach().view(INTEGERS[tensor.element_size()])
    return raw.as_strided((count,), (tensor.numel() // count,))
