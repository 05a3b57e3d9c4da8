"""Streams and events of a worker's device, so that the scatter reads the same on CPU and GPU."""

from __future__ import annotations

import contextlib
import mmap
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
    """One CUDA stream; `record` marks its present end. Made by the thread that uses it, which then works on its GPU."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # a new thread starts on the first GPU
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


def record_now(device: torch.device) -> torch.cuda.Event | None:
    """The present end of the caller's work on `device`; None on CPU, where it is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def with_index(device: torch.device) -> torch.device:
    """`cuda` as the caller's current GPU: in another thread it would be another one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def host_pages(nbytes: int) -> torch.Tensor:
    """Flat uint8 host memory in pages of its own, zeroed; OSError or ValueError when there is none.

    Only such memory can be page-locked whole: what torch allocates may share a page with memory that is locked already.
    """
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


def page_lock_memory(memory: torch.Tensor) -> None:
    """Page-lock `host_pages` whole, for as long as they live; RuntimeError when the driver refuses.

    The GPU's kernels can then read and write them at the address that they have.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status != 0:
        raise RuntimeError(f"cudaHostRegister of {memory.numel():,} bytes failed with CUDA error {status}")
    weakref.finalize(memory.untyped_storage(), torch.cuda.cudart().cudaHostUnregister, memory.data_ptr())
