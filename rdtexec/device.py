"""Streams and events of a worker's device, so that the scatter reads the same on CPU and GPU."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch


class HostLane:
    """CPU: copies happen in the calling thread, and what is done is done."""

    def enter(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def record(self) -> None:
        return None

    def after(self, event: Any) -> None:
        """Order later work of this lane after `event`."""


class CudaLane:
    """One CUDA stream; `record` marks its present end."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def enter(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def after(self, event: Any) -> None:
        if event is not None:
            self.stream.wait_event(event)


def make_lane(device: torch.device) -> HostLane | CudaLane:
    """A lane of work on `device`."""
    return CudaLane(device) if device.type == "cuda" else HostLane()


def page_lock_memory(memory: torch.Tensor) -> None:
    """Page-lock host memory whole, for the life of the process; RuntimeError when the driver refuses."""
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister of {memory.numel():,} bytes failed with {status}")
    weakref.finalize(memory.untyped_storage(), torch.cuda.cudart().cudaHostUnregister, memory.data_ptr())
