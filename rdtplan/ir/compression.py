"""Plan files compressed as a whole: `fleet.plan.zst`, where the `zstandard` package is installed.

Compression is outside the seal: digests are those of the plain file, which is what canonical bytes are promised for. A
compressed file is unpacked into memory when it is opened, so it gives up reading one worker's part alone for its size.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, BinaryIO

from rdtplan.errors import PlanFormatError

SUFFIX = ".zst"
MAGIC = b"\x28\xb5\x2f\xfd"
EXPANSION = 256
"""A compressed plan unpacks to at most this many times its size (a plan of a 235B model: 41), and `FREE_NBYTES`."""
FREE_NBYTES = 1 << 20
PIPED_NBYTES = 1 << 30
"""Bytes of a plan that are read from a pipe; one of 72 workers has 2,000,000."""
LEVEL = 12


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise PlanFormatError(
            f"{path} is compressed, and this environment cannot read or write such a file",
            fix="pip install 'rdtplan[zstd]', or use the plain plan",
            code="RDT409",
        ) from None
    return zstandard


def _ends_within(zstandard: Any, packed: bytes, limit: int) -> bool:
    """Is there nothing left of a frame when at most `limit` bytes of it are unpacked?"""
    with zstandard.ZstdDecompressor().stream_reader(packed) as unpacking:
        while limit > 0:
            piece = unpacking.read(min(limit, FREE_NBYTES))
            if not piece:
                return True
            limit -= len(piece)
        return not unpacking.read(1)


def compress(data: bytes, path: Path) -> bytes:
    """One zstd frame that states its size."""
    packed: bytes = _zstandard(path).ZstdCompressor(level=LEVEL, write_checksum=True).compress(data)
    return packed


def _piped(file: BinaryIO, path: Path) -> bytes:
    data = file.read(PIPED_NBYTES + 1)
    if len(data) > PIPED_NBYTES:
        raise PlanFormatError(
            f"{path} is a pipe that gives more than {PIPED_NBYTES:,} bytes, the most that is read into memory",
            fix="name the plan as a file",
            code="RDT404",
        )
    return data


def plain(file: BinaryIO, path: Path) -> tuple[BinaryIO, int]:
    """The file itself, or its content in memory where it is compressed or comes through a pipe; and its size as it is.

    PlanFormatError RDT403 when it is damaged, RDT404 when it has an impossible size.
    """
    if not file.seekable():
        with file:
            file = io.BytesIO(_piped(file, path))
    nbytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(len(MAGIC))
    file.seek(0)
    if start != MAGIC:
        return file, nbytes
    zstandard = _zstandard(path)
    with file:
        packed = file.read()
    limit = EXPANSION * len(packed) + FREE_NBYTES
    try:
        claimed = zstandard.frame_content_size(packed)
        if claimed > limit and _ends_within(zstandard, packed, limit):
            raise PlanFormatError(
                f"{path} is truncated: it should unpack to {claimed:,} bytes, and ends before that",
                fix="compile the plan again, or fetch an undamaged copy",
                code="RDT403",
            )
        if not 0 <= claimed <= limit:
            raise PlanFormatError(
                f"{path} claims to unpack to {claimed:,} bytes, a plan of its size has at most {limit:,}",
                fix="compile the plan again, or fetch an undamaged copy",
                code="RDT404",
            )
        unpacked = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PlanFormatError(
            f"{path} cannot be unpacked: {str(error)[:80]}",
            fix="compile the plan again, or fetch an undamaged copy",
            code="RDT403",
        ) from None
    return io.BytesIO(unpacked), nbytes
