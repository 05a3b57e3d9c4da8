"""Make the golden plans of the present format: python tests/golden/make.py (see README.md: not after its release)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from plans import Scenario, Sizes, make_plan  # noqa: E402

from rdtplan.ir.file import write_plan  # noqa: E402
from rdtplan.ir.plan import FORMAT, FleetPlan  # noqa: E402
from rdtplan.ir.topology import InferenceTopology, TransferSettings  # noqa: E402

SCENARIOS = {
    "replicas": Scenario(
        sizes=Sizes(vocab=13, vocab_padding=8, tied=True),
        topology=InferenceTopology(tensor_parallel=2, replicas=2),
        settings=TransferSettings(max_chunk_bytes=256, stages_in_flight=2),
        trainer_ranks=4,
        ownership="pipeline",
        seed=1,
    ),
    "experts": Scenario(
        sizes=Sizes(layers=6, experts=32),
        topology=InferenceTopology(tensor_parallel=2, data_parallel=2, expert_parallel=True),
        trainer_ranks=3,
    ),
    "redundant": Scenario(
        sizes=Sizes(layers=3, experts=8),
        topology=InferenceTopology(tensor_parallel=2, expert_parallel=True, redundant_experts=4),
    ),
}


def contents(plan: FleetPlan, digest: str) -> dict[str, Any]:
    """What a reader of any later version must find."""
    return {
        "digest": digest,
        "identity": plan.identity,
        "names": len(plan.manifest),
        "pulled_nbytes": list(plan.overview.pulled_nbytes),
        "scatters": [len(c.program.scatters) for c in plan.consumers],
        "consumers": [c.digest for c in plan.consumers],
    }


def main() -> None:
    found = {}
    for name, scenario in SCENARIOS.items():
        plan, file = make_plan(scenario), f"{FORMAT}-{name}.plan"
        found[file] = contents(plan, write_plan(plan, HERE / file))
    known = json.loads((HERE / "contents.json").read_text()) if (HERE / "contents.json").exists() else {}
    (HERE / "contents.json").write_text(json.dumps({**known, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
