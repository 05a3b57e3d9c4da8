"""vLLM's in-process backend `sharded_rdt` on CPU, so that the benchmark has its peer on the same machine.

The backend is written for CUDA; everything in it that does not name CUDA runs here as it is: the bake, the chunk plan,
the pulls over Ray Direct Transport, the packing, the scatter and post-processing threads. Changed is only this, and
none of it makes the peer slower than the original would be on this machine:

- Trainer: `Tensor.cuda()` gives the tensor itself (no copy). Every tensor goes through the peer's own export ring, as
  tensors of up to 64 MiB do in the original; the ring's slots are memfds that the producer process maps, where the
  original exports CUDA IPC handles. The mapping is kept over syncs; the original opens its handles anew in each.
- Producer process: device "cpu" instead of "cuda:0", and a `pid` method for the measurement.
- Worker: `torch.cuda.set_device` and `torch.cuda.device` do nothing. vLLM's CPU worker has already replaced streams and
  events with placeholders.

The threads, locks, waits and messages are the peer's.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

import torch
import vllm.distributed.weight_transfer.sharded_rdt_trainer as peer
from vllm.distributed.weight_transfer.sharded_rdt_common import register_nixl_memory

_PAGE = 4096
_mapped: dict[tuple[Any, ...], torch.Tensor] = {}
"""Export slots of the trainer that this producer process has mapped."""


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


def _open_slot(*handle: Any) -> torch.Tensor:
    """The export slot behind a handle (pid, descriptor, inode, bytes, ...), in place of an opened CUDA IPC handle."""
    pid, descriptor, inode, nbytes = handle[:4]
    key = (pid, inode)
    if key not in _mapped:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        try:
            _mapped[key] = _map(opened, nbytes)
        finally:
            os.close(opened)
    return _mapped[key]


class CpuProducerServer(peer._RDTProducerServer):
    """The peer's producer process on CPU memory."""

    def __init__(self, **settings: Any) -> None:
        torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]
        peer.rebuild_cuda_tensor = _open_slot
        super().__init__(**settings)
        self._serve_device = torch.device("cpu")

    def warmup_nixl(self) -> None:
        """Make Ray's NIXL agent by registering a buffer, as the original does with one on the GPU."""
        self._nixl_warmup_buf = torch.zeros(1 << 20, dtype=torch.uint8)
        with self._reg_lock:
            register_nixl_memory(self._nixl_warmup_buf)

    def pid(self) -> int:
        return os.getpid()


class CpuTrainer(peer.ShardedRDTTrainerWeightTransferEngine):
    """The peer's trainer; export slots are shared memory. Make the process fit with `patch_trainer` first."""

    def _pack_group_for_export(self, held: list[Any], slot_idx: int) -> tuple[Any, ...]:
        need = sum(-(-t.numel() * t.element_size() // 16) * 16 for _, t in held)
        slot = self._export_ring[slot_idx]
        if slot is None or slot.numel() < need:
            nbytes = -(-need // _PAGE) * _PAGE
            descriptor = os.memfd_create("peer-export-slot")
            os.ftruncate(descriptor, nbytes)
            self._export_ring[slot_idx] = _map(descriptor, nbytes)
            handle = (os.getpid(), descriptor, os.fstat(descriptor).st_ino, nbytes, 0, 0, 0)
            self.__dict__.setdefault("_slot_handles", {})[slot_idx] = handle
        self._export_ring_args[slot_idx] = self.__dict__["_slot_handles"][slot_idx]
        return super()._pack_group_for_export(held, slot_idx)

    def producer_pid(self) -> int:
        return self._rpc("pid")


def patch_trainer() -> None:
    """Make this process a trainer of the peer on CPU."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment]
    peer._EXPORT_RING_MAX_BYTES = 1 << 62
    peer._RDTProducerServer = CpuProducerServer  # type: ignore[misc]


def patch_worker() -> None:
    """Make this process a worker of the peer on CPU."""
    torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[assignment,misc]
