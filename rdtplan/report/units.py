"""Numbers for people."""

from __future__ import annotations


def human_bytes(n: int) -> str:
    """Bytes in binary units, three digits.

    >>> human_bytes(1536)
    '1.5 KiB'
    """
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{int(value)} B" if unit == "B" else f"{value:.{0 if value >= 100 else 1}f} {unit}"
        value /= 1024
    raise AssertionError
