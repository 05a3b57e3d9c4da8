"""Proof of byte equality, end to end: a digest of each chunk at the producer's source, and at the final destination.

The producer hashes the slices as they lie in the trainer's tensors, before any packing or sharing; the consumer hashes
the same slices as they lie in its parameters, after the scatter and before post-processing. `full` covers every chunk
of every sync, `sampled` one in `PERIOD`, others every sync, so that `PERIOD` syncs cover all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

MODES = ("off", "sampled", "full")
PERIOD = 16


def wanted(mode: str, sync: int, chunk: int) -> bool:
    """Is this chunk of this sync to be checked?"""
    return mode == "full" or (mode == "sampled" and (sync + chunk) % PERIOD == 0)


def digest(slices: Iterable[torch.Tensor]) -> str:
    """128 bits over the bytes of `slices`, each read in row-major order."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in slices:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())
    return found.hexdigest()
