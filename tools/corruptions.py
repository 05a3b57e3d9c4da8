"""Ruin plan files in many ways and see that every one is refused with one clean error.

    python tools/corruptions.py [--count 20000] [--seed 1] [--commands]

Every file is read whole and verified, and by a worker and a trainer rank alone. `--commands` also runs the inspection
commands on each (slower). A file that takes longer than 20 s of the processor (or 5 minutes by the clock), an exception
that is none of the project's, or a file that is accepted is printed and fails the run; memory is limited to 3 GiB of
address space. A file that is sealed soundly and is the very plan that it was made from, in other words (a default left
out, a column that is read from its copy), is none of these and counted apart.
"""

from __future__ import annotations

import argparse
import collections
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from corruption import Ruined, corpus  # noqa: E402

from rdtplan.errors import RdtError  # noqa: E402
from rdtplan.ir.file import PlanFile  # noqa: E402
from rdtplan.ir.plan import FleetPlan  # noqa: E402
from rdtplan.verify import verify_fleet  # noqa: E402

DEADLINE_S = 20
CLOCK_DEADLINE_S = 300
SAME = "the same plan"


def judge(path: Path, sound: Sequence[FleetPlan]) -> str:
    """How a ruined file ends: a code when it is refused, `SAME`, `accepted`, or what went wrong.

    `sound` are the plans that it may be in other words.
    """
    try:
        with PlanFile(path) as file:
            fleet = file.fleet()
        findings = verify_fleet(fleet)
        return findings[0].code if findings else SAME if fleet in sound else "accepted"
    except RdtError as error:
        return error.code
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {str(error)[:200]}"


def judge_parts(path: Path) -> str:
    """A worker and a trainer rank load their own parts: fine, or refused by one clean error."""
    from rdtexec.plans import load_trainer, load_worker

    for load in (load_worker, load_trainer):
        try:
            load(path, 0)
        except RdtError:
            continue
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return f"{load.__name__}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def judge_commands(path: Path, sound: Path) -> str:
    """The inspection commands end with an exit code and no traceback."""
    from click.testing import CliRunner

    from rdtplan.cli import main

    for command in (
        ["inspect", path],
        ["inspect", path, "--worker", "0"],
        ["inspect", path, "--producer", "0"],
        ["inspect", path, "--group", "1"],
        ["inspect", path, "--chunk", "0"],
        ["mem", path],
        ["explain", path, "*"],
        ["diff", path, sound],
        ["simulate", path],
        ["verify", path],
    ):
        result = CliRunner().invoke(main, [str(a) for a in command])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            return f"{command[0]}: {type(result.exception).__name__}: {str(result.exception)[:200]}"
    return ""


def clean(verdict: str) -> bool:
    return verdict == SAME or verdict.startswith("RDT")


def run(count: int, seed: int, commands: bool) -> int:
    """Print the rate; 1 when any file was not refused cleanly."""
    from corruption import bases

    from rdtplan.ir.file import write_plan

    tally: collections.Counter[tuple[str, str]] = collections.Counter()
    wrong: list[tuple[Ruined, str]] = []
    slowest, started = 0.0, time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        path, sound = Path(directory) / "ruined.plan", Path(directory) / "sound.plan"
        plans = bases()
        write_plan(plans[0], sound)
        for ruined in corpus(count, seed):
            path.write_bytes(ruined.data)
            began = time.perf_counter()
            signal.setitimer(signal.ITIMER_PROF, DEADLINE_S)
            signal.alarm(CLOCK_DEADLINE_S)
            verdict = judge(path, plans)
            more = judge_parts(path) or (judge_commands(path, sound) if commands else "")
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            slowest = max(slowest, time.perf_counter() - began)
            tally[ruined.family, verdict if clean(verdict) else "NOT REFUSED CLEANLY"] += 1
            if not clean(verdict) or more:
                wrong.append((ruined, more or verdict))
    for (family, verdict), n in sorted(tally.items()):
        print(f"{family:<8} {verdict:<20} {n:>6}")
    same = sum(n for (_, verdict), n in tally.items() if verdict == SAME)
    refused = count - same - len(wrong)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{refused:,} of {count:,} refused with one clean error, {same} are the same plan in other words, {len(wrong)} "
        f"went wrong; seed {seed}, slowest {slowest:.2f} s, peak memory {peak:.0f} MiB, "
        f"{time.perf_counter() - started:.0f} s in all"
    )
    for ruined, verdict in wrong[:20]:
        print(f"  {ruined.family}, {ruined.what}: {verdict}")
    return 1 if wrong else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commands", action="store_true")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, _too_slow)
    sys.exit(run(args.count, args.seed, args.commands))


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"not refused within {DEADLINE_S} s of the processor, {CLOCK_DEADLINE_S} s by the clock")


if __name__ == "__main__":
    main()
