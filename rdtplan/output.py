"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path


def place_of(path: str | os.PathLike[str]) -> Path:
    """Where a file written to `path` ends up: symbolic links are followed.

    OSError when something is there that is no regular file (a directory, a device, a pipe), or no directory to put it.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        place = Path(path).resolve()
        if not place.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"the directory {place.parent} does not exist") from None
        return place
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, where a file should be replaced")
    return Path(path).resolve()


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file so that a full disk or a crash leaves the old one or none. OSError when that cannot be done."""
    place, temporary = place_of(path), ""
    try:
        with tempfile.NamedTemporaryFile(dir=place.parent, prefix=f".{place.name}.", delete=False) as out:
            temporary = out.name
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, place)
    except BaseException:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise
