"""Terminal tables that keep to the width they are given."""

from __future__ import annotations

from typing import Any


def make_table(title: str, label: str, *numbers: str) -> Any:
    """A plain rich table: one left-aligned column of labels, then right-aligned numbers, never folded."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    table.add_column(label, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
