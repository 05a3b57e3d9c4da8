"""Apply every mutation of the corpus and see who refuses it, with which code.

    python tools/mutations.py [--only PATTERN] [--markdown | --json]

Prints a row a mutation and the detection rate; exits 1 when one went through, was refused with another code or by
somebody else, or when a subject that is not mutated is refused. `--markdown` prints the table of docs/mutations.md.
Needs the CPU build of vLLM, no GPU; takes about a minute.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from mutation import Bench, Mutation, passes_unmutated, refusal  # noqa: E402
from mutations import MUTATIONS  # noqa: E402


def row(mutation: Mutation, found: str) -> str:
    """One line of the table of docs/mutations.md."""
    return f"| {mutation.name} | {mutation.incident} | {mutation.applied_to} | `{mutation.caught_by}` | {found} |"


def run(only: str, form: str) -> int:
    """Print the table and the rate; 1 unless all were refused as the table says and nothing else was."""
    wanted = [m for m in MUTATIONS if fnmatch.fnmatch(m.name, only)]
    caught, wrong, alarms = 0, [], []
    found: dict[str, Any] = {}
    if form == "markdown":
        print("| mutation | what happens | applied to | caught by | code |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        for mutation in wanted:
            error = refusal(mutation, bench)
            code = error.code if error else "NOT REFUSED"
            caught += error is not None
            if code != mutation.code:
                wrong.append(f"{mutation.name}: expected {mutation.code}, found {error or 'nothing'}")
            if not passes_unmutated(mutation, bench):
                alarms.append(f"{mutation.name}: the subject {mutation.subject!r} is refused as it is")
            found[mutation.name] = [code, error.message if error else "", passes_unmutated(mutation, bench)]
            line = f"{mutation.name:<52} {mutation.applied_to:<12} {mutation.caught_by:<17} {code}"
            if form != "json":
                print(row(mutation, code) if form == "markdown" else line, flush=True)
    if form == "json":
        print(json.dumps(found))
        return 0
    rate = 100 * caught / max(1, len(wanted))
    print(
        f"\n{caught} of {len(wanted)} mutations refused: detection rate {rate:.1f} %; "
        f"{len(wanted) - len(wrong)} with the code of the table; {len(alarms)} false alarms"
    )
    for line in (*wrong, *alarms):
        print(f"  {line}")
    return 1 if wrong or alarms or not wanted else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="a shell pattern over names")
    parser.add_argument("--markdown", dest="form", action="store_const", const="markdown", help="for docs/mutations.md")
    parser.add_argument("--json", dest="form", action="store_const", const="json", help="for the tests")
    args = parser.parse_args()
    sys.exit(run(args.only, args.form or "text"))


if __name__ == "__main__":
    main()
