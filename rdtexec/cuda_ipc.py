"""Device memory that another process can map: allocation, handle and mapping through the CUDA driver.

The memory is a plain driver allocation and not torch's: torch may place tensors in expandable segments, which have no
IPC handle, and many tensors in one allocation. A handle names the whole allocation and is 64 bytes, so it travels in a
control message; there is no file and nothing is left behind however the processes end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

import torch

from rdtexec.device import with_index

_HANDLE_NBYTES = 64
_LAZY_PEER_ACCESS = 1
_ALREADY_ENABLED = 704


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _HANDLE_NBYTES),)


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, call: str) -> None:
    """RuntimeError with the driver's own name of the error."""
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"{call}: {(name.value or b'unknown error').decode()}")


@contextlib.contextmanager
def _context(device: torch.device) -> Iterator[Any]:
    """The driver, with the device's primary context (the one torch uses) current in this thread.

    The context is kept for the life of the process: given back before torch has begun to use it, it would be destroyed
    with all memory in it.
    """
    cuda = _driver()
    _check(cuda.cuInit(0), "cuInit")
    ordinal, context, popped = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(cuda.cuDeviceGet(ctypes.byref(ordinal), device.index), "cuDeviceGet")
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal), "cuDevicePrimaryCtxRetain")
    _check(cuda.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    try:
        yield cuda
    finally:
        cuda.cuCtxPopCurrent_v2(ctypes.byref(popped))


def _let_reach(device: torch.device, other: torch.device) -> None:
    """Let kernels on `device` read memory of this process on `other`; RuntimeError where the GPUs cannot."""
    with _context(other) as cuda:
        context = ctypes.c_void_p()
        _check(cuda.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    with _context(device) as cuda:
        status = cuda.cuCtxEnablePeerAccess(context, 0)
        if status != _ALREADY_ENABLED:
            _check(status, "cuCtxEnablePeerAccess")


def _tensor(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Flat uint8 over memory that somebody else owns."""
    torch.cuda.init()
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


class SharedMemory:
    """An allocation of this process, for others to map. `memory` is flat uint8."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """RuntimeError when it does not fit."""
        device = with_index(device)
        self._device, self._address = device, ctypes.c_uint64()
        with _context(device) as cuda:
            _check(cuda.cuMemAlloc_v2(ctypes.byref(self._address), ctypes.c_size_t(nbytes)), "cuMemAlloc")
            handle = _Handle()
            _check(cuda.cuIpcGetMemHandle(ctypes.byref(handle), self._address), "cuIpcGetMemHandle")
        self.memory = _tensor(self._address.value, nbytes, device)
        self.facts: dict[str, Any] = {
            "pid": os.getpid(),
            "ordinal": device.index,
            "address": self._address.value,
            "handle": bytes(handle).hex(),
            "nbytes": nbytes,
        }
        """For `MappedMemory`, JSON throughout."""

    def close(self) -> None:
        """Free it. Nobody may read it any more."""
        if self._address.value:
            with _context(self._device) as cuda:
                torch.cuda.synchronize(self._device)
                cuda.cuMemFree_v2(self._address)
            self._address.value = 0


class MappedMemory:
    """Memory of another process, or of this one, as a kernel on `device` sees it. `memory` is flat uint8."""

    def __init__(self, facts: dict[str, Any], device: torch.device) -> None:
        """RuntimeError when it cannot be mapped, as between GPUs that do not reach each other."""
        device = with_index(device)
        self._device, self._address = device, ctypes.c_uint64()
        if facts["pid"] == os.getpid():  # a process cannot open a handle of its own
            if facts["ordinal"] != device.index:
                _let_reach(device, torch.device("cuda", facts["ordinal"]))
            self.memory = _tensor(facts["address"], facts["nbytes"], device)
            return
        handle = _Handle.from_buffer_copy(bytes.fromhex(facts["handle"]))
        with _context(device) as cuda:
            opening = cuda.cuIpcOpenMemHandle_v2
            opening.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
            _check(opening(ctypes.addressof(self._address), handle, _LAZY_PEER_ACCESS), "cuIpcOpenMemHandle")
        self.memory = _tensor(self._address.value, facts["nbytes"], device)

    def close(self) -> None:
        """Unmap it. No copy out of it may be under way."""
        if self._address.value:
            with _context(self._device) as cuda:
                cuda.cuIpcCloseMemHandle(self._address)
            self._address.value = 0
