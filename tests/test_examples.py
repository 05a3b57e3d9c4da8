"""The examples, each run as a user would: one command, no environment set up, from another directory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "docs/examples"
SCRIPTS = sorted(p.name for p in EXAMPLES.glob("*.py") if p.name not in ("tiny.py", "http_trainer.py"))
"""http_trainer.py is part of http_server.md, whose server and plan the reader makes."""

pytestmark = pytest.mark.slow


def environment() -> dict[str, str]:
    """A user's: none of the settings that the tests or this machine have."""
    ours = ("VLLM_", "HF_", "TORCH", "OMP_", "RAY_", "RDTPLAN_")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)}


def processes_of(directory: Path) -> list[int]:
    """Whatever runs with this TMPDIR: the example and all that it started, however they are called."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"TMPDIR={directory}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short path: Ray's sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="ex-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def start(script: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
        env=environment() | {"TMPDIR": str(directory)},
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_checks_itself_and_leaves_nothing(script: str, scratch: Path) -> None:
    example = start(script, scratch)
    try:
        output, _ = example.communicate(timeout=850)
    except BaseException:
        example.terminate()
        raise
    assert example.returncode == 0, output[-6000:]
    assert output.count("  ok   ") >= 3 and "WRONG" not in output
    assert not list(scratch.glob("rdtexec-*")), "scratch files are left"
    deadline = time.monotonic() + 15  # Ray tells its processes to end, and does not wait for all of them
    while processes_of(scratch) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(scratch) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_its_example(how: signal.Signals, tmp_path: Path) -> None:
    """Also when nobody is left to end it. There is the example, the server, and the engine that the server started."""
    example = start("reload_from_checkpoint.py", tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("rdtexec-*/server-*.log")) or len(processes_of(tmp_path)) < 3:
            assert time.monotonic() < deadline and example.poll() is None
            time.sleep(0.2)
    finally:
        example.send_signal(how)
        example.wait(60)
    deadline = time.monotonic() + 60
    while processes_of(tmp_path):
        assert time.monotonic() < deadline, "a server outlives its example"
        time.sleep(0.2)


def test_the_list_of_examples_is_complete() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    assert [name for name in SCRIPTS if f"python docs/examples/{name}" not in readme] == []
