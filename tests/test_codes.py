"""The table of codes is complete, and nothing stands in it that the source does not raise."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import attrs
import pytest

from rdtplan import errors
from rdtplan.codes import CODES, Code
from rdtplan.errors import RdtError
from rdtplan.verify.findings import WAIVABLE

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"RDT\d{3}")


def codes_in_source() -> dict[str, list[str]]:
    """Code -> where it is raised. Docstrings, which only mention codes, do not count."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "rdtplan").rglob("*.py")) + sorted((ROOT / "rdtexec").rglob("*.py")):
        if path.name == "codes.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value):
                found.setdefault(node.value, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_every_code_that_is_raised_is_in_the_table() -> None:
    missing = {code: places for code, places in codes_in_source().items() if code not in CODES}
    assert not missing, f"add to rdtplan/codes.py: {missing}"


def test_every_code_in_the_table_is_raised() -> None:
    unused = sorted(set(CODES) - set(codes_in_source()))
    assert not unused, f"no longer raised, though a code is for ever: {unused}"


def test_every_code_that_a_docstring_mentions_is_in_the_table() -> None:
    for package in ("rdtplan", "rdtexec"):
        for path in (ROOT / package).rglob("*.py"):
            unknown = sorted(set(CODE.findall(path.read_text())) - set(CODES))
            assert not unknown, (path, unknown)


def test_the_table_is_in_order_and_says_something() -> None:
    assert list(CODES) == sorted(CODES) and all(CODE.fullmatch(c) for c in CODES)
    titles = [c.title for c in CODES.values()]
    assert len(set(titles)) == len(titles)
    for name, code in CODES.items():
        assert 0 < len(code.title) <= 40 and not code.title.endswith("."), name
        for sentence in (code.meaning, code.remedy):
            assert len(sentence) > 10 and sentence[0].isupper() and sentence.endswith("."), (name, sentence)


def test_the_table_cannot_be_changed_by_accident() -> None:
    assert attrs.has(Code)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        CODES["RDT100"].title = "x"  # type: ignore[misc]


def test_the_hundreds_are_the_classes_of_errors() -> None:
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, RdtError)]
    assert sorted(c.code for c in classes) == [f"RDT{n}00" for n in range(7)]
    by_hundred = {c.code[3]: c for c in classes}
    for path in [*(ROOT / "rdtplan").rglob("*.py"), *(ROOT / "rdtexec").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            for keyword in node.keywords:
                value = keyword.value
                if keyword.arg == "code" and isinstance(value, ast.Constant) and node.func.id.endswith("Error"):
                    assert by_hundred[value.value[3]].__name__ == node.func.id, f"{path}:{node.lineno}"


def test_waivable_codes_say_so() -> None:
    for name, code in CODES.items():
        assert (f"--waive {name}:PATTERN" in code.remedy) == (name in WAIVABLE), name


def test_errors_cross_a_process_boundary() -> None:
    import pickle

    for _, cls in inspect.getmembers(errors, inspect.isclass):
        if issubclass(cls, RdtError):
            error = cls("what", fix="how", code="RDT123")
            again = pickle.loads(pickle.dumps(error))
            assert (type(again), str(again)) == (cls, "RDT123: what\n  what to do: how")
            assert str(cls("what")) == f"{cls.code}: what"
