"""Every mutation of the corpus is refused, by the one who should and with the right code; nothing else is.

The corpus runs in a process of its own (`tools/mutations.py --json`), in which vLLM has stand-ins for what its CPU
build lacks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "mutations.md"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Name -> [code, message, was the subject let through as it is]."""
    command = [sys.executable, str(ROOT / "tools" / "mutations.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rows() -> list[list[str]]:
    """[name, code] of every row of the documented table."""
    cells = [line.strip("| \n").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return [[c[0], c[-1]] for c in cells if c[-1].startswith("RDT")]


def test_the_corpus_is_large_enough() -> None:
    assert len(rows()) == len({name for name, _ in rows()}) >= 40


@pytest.mark.parametrize(("name", "code"), rows(), ids=[name for name, _ in rows()])
def test_a_mutation_is_refused(name: str, code: str, found: dict[str, Any]) -> None:
    refused, message, let_through = found[name]
    assert refused == code, message
    assert let_through, "the judge refuses what is not mutated"


def test_the_table_is_the_corpus(found: dict[str, Any]) -> None:
    """docs/mutations.md was generated from the corpus that ran."""
    assert [name for name, _ in rows()] == list(found)
