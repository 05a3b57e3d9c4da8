"""Plan files compressed as a whole: `fleet.plan.zst`, where the `zstandard` package is installed.

Compression is outside the seal: digests are those of the plain file, which is what canonical bytes are promised for. A
compressed file is unpacked into memory when it is opened, so it gives up reading one worker's part alone for its size.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, BinaryIO

from rdtplan.errors import PlanFormatError

SUFFIX = ".zst"
MAGIC = b"\x28\xb5\x2f\xfd"
EXPANSION = 256
"""A compressed plan unpacks to at most this many times its size (a plan of a 235B model: 41), and `FREE_NBYTES`."""
FREE_NBYTES = 1 << 20
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


def compress(data: bytes, path: Path) -> bytes:
    """One zstd frame that states its size."""
    packed: bytes = _zstandard(path).ZstdCompressor(level=LEVEL, write_checksum=True).compress(data)
    return packed


def plain(file: BinaryIO, path: Path) -> BinaryIO:
    """The file itself, or its content in memory where it is compressed.

    PlanFormatError RDT403 when it is damaged, RDT404 when it claims an impossible size.
    """
    start = file.read(len(MAGIC))
    file.seek(0)
    if start != MAGIC:
        return file
    zstandard = _zstandard(path)
    packed = file.read()
    limit = EXPANSION * len(packed) + FREE_NBYTES
    try:
        claimed = zstandard.frame_content_size(packed)
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
    return io.BytesIO(unpacked)
