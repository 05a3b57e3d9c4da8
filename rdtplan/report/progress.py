"""A progress bar on a terminal, and silence in a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """A callback `(stage, done, total)` that draws on stderr, or None when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks = {"loading vLLM": bar.add_task("loading vLLM", total=None)}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                bar.update(tasks["loading vLLM"], visible=False)
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield report
