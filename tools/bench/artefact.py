"""Figures of plan files as artefacts: size, one worker's part loaded and verified, and how quick the commands are.

    python tools/bench/artefact.py PLAN [PLAN ...]

Every figure is the median of 5 fresh processes, in CPU seconds of one thread; a fixed loop is timed beside them,
since a busy machine makes all of them slower. Compile plans with `tools/qwen3_235b.py` and `rdtplan compile`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

REPEATS = 5
LOOP = "for i in range(3_000_000): x = i"
LOAD = "import sys; from rdtexec.plans import load_worker; load_worker(sys.argv[1], 3)"


def cpu_seconds(code: str, *arguments: str, before: str = "") -> float:
    """Median CPU seconds of `code`, the imports of `before` left out."""
    timed = f"{before}\nimport time\nstarted = time.process_time()\n{code}\nprint(time.process_time() - started)"
    times = []
    for _ in range(REPEATS):
        done = subprocess.run([sys.executable, "-c", timed, *arguments], capture_output=True, text=True, check=True)
        times.append(float(done.stdout.split()[-1]))
    return statistics.median(times)


def command_seconds(*arguments: str) -> tuple[float, str]:
    """Median CPU seconds of a whole command, interpreter and imports included, and which heavy modules it imports."""
    code = (
        "import sys, time\n"
        "from rdtplan.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = [m for m in ('torch', 'vllm') if m in sys.modules]\n"
        "print('\\n' + ','.join(heavy), time.process_time())"
    )
    times, heavy = [], ""
    for _ in range(REPEATS):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        last = done.stdout.splitlines()[-1]
        heavy = last.rpartition(" ")[0]
        times.append(float(last.rpartition(" ")[2]))
    return statistics.median(times), heavy


def main() -> None:
    plans = sys.argv[1:]
    if not plans or not all(Path(p).is_file() for p in plans):
        sys.exit(__doc__)
    loop = cpu_seconds(LOOP)
    print(f"a loop of 3,000,000 steps on this machine now: {loop * 1e3:.0f} ms")
    print(f"rdtplan --help: {command_seconds('--help')[0]:.2f} s")
    for plan in plans:
        print(f"{plan}: {Path(plan).stat().st_size / 1e6:.2f} MB")
        load = cpu_seconds("load_worker(sys.argv[1], 3)", plan, before=LOAD.rpartition(";")[0])
        print(f"  one worker's part loaded and verified: {load * 1e3:.0f} ms ({load / loop:.1f} loops)")
        for command in (["inspect", plan], ["explain", plan, "*.up_proj.weight"], ["diff", plans[0], plan]):
            seconds, heavy = command_seconds(*command)
            print(f"  {command[0]}: {seconds:.2f} s, imports of torch or vllm: {heavy or 'none'}")


if __name__ == "__main__":
    main()
