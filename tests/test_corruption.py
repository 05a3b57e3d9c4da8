"""A few hundred of the ruined files that `tools/corruptions.py` makes by the ten thousand."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from corruption import bases, corpus

from rdtplan.ir.file import write_plan

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import corruptions  # noqa: E402


def test_every_ruined_file_is_refused_with_one_clean_error(tmp_path: Path) -> None:
    """By the whole check, by a worker and by a trainer rank."""
    families: Counter[str] = Counter()
    sound = bases()
    for ruined in corpus(400, seed=11):
        (tmp_path / "p").write_bytes(ruined.data)
        verdict = corruptions.judge(tmp_path / "p", sound)
        assert corruptions.clean(verdict), (ruined.what, verdict)
        assert corruptions.judge_parts(tmp_path / "p") == "", ruined.what
        families[ruined.family] += 1
    assert min(families.values()) > 100


@pytest.mark.parametrize("seed", [21, 22])
def test_the_commands_refuse_ruined_files_cleanly(tmp_path: Path, seed: int) -> None:
    """No traceback, whatever is looked at."""
    sound = tmp_path / "sound"
    write_plan(bases()[0], sound)
    for ruined in corpus(45, seed):
        (tmp_path / "p").write_bytes(ruined.data)
        assert corruptions.judge_commands(tmp_path / "p", sound) == "", ruined.what


def test_the_same_seed_gives_the_same_corpus() -> None:
    assert [r.data for r in corpus(30, 5)] == [r.data for r in corpus(30, 5)]


def test_a_sound_file_is_not_refused(tmp_path: Path) -> None:
    """The judge can tell."""
    write_plan(bases()[1], tmp_path / "p")
    assert corruptions.judge(tmp_path / "p", bases()[:1]) == "accepted" and not corruptions.clean("accepted")
    assert corruptions.judge(tmp_path / "p", bases()) == corruptions.SAME
    assert corruptions.judge_parts(tmp_path / "p") == "" == corruptions.judge_commands(tmp_path / "p", tmp_path / "p")
