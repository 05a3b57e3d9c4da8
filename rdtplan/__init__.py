"""rdtplan: compile, inspect and verify weight-transfer plans for vLLM.

    import rdtplan

    plan = rdtplan.compile("Qwen3-235B-A22B", "checkpoint/", tensor_parallel=8, trainer_ranks=8)
    rdtplan.save(plan, "fleet.plan")
    print(rdtplan.diff("before.plan", plan).cause)

Importing it costs nothing. Only `compile` needs vLLM and torch; see docs/api.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rdtplan.inputs.owners import OwnerRule
    from rdtplan.ir.experts import Placement
    from rdtplan.ir.manifest import SourceTensor
    from rdtplan.ir.plan import FleetPlan, Waiver
    from rdtplan.ir.topology import TransferSettings
    from rdtplan.ir.view import PlanView
    from rdtplan.report.compare import PlanDiff
    from rdtplan.verify.findings import Finding

__version__ = "0.1.0"
__all__ = ["check", "compile", "diff", "load", "place_experts", "save"]

Path = str | os.PathLike[str]


def load(path: Path) -> FleetPlan:
    """Read a whole plan file. Every seal is checked; `check` finds what is wrong with what the plan says.

    PlanFormatError when the file is missing, damaged or of another major version. For one worker's part of a large
    plan, use `rdtplan.ir.file.PlanFile`, which reads nothing else.
    """
    from rdtplan.ir.file import PlanFile

    with PlanFile(path) as file:
        return file.fleet()


def save(plan: FleetPlan, path: Path) -> str:
    """Write a plan file, all or nothing, and return the fleet digest (hexadecimal SHA-256).

    The same plan gives the same bytes on every machine. PlanFormatError RDT407 when it cannot be written.
    """
    from rdtplan.ir.file import write_plan

    return write_plan(plan, path)


def check(
    plan: FleetPlan | Path,
    model: Path | None = None,
    manifest: Path | Iterable[SourceTensor] | None = None,
    *,
    speculative_config: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Everything that is wrong with a plan: digests, structure, completeness. Empty for a sound plan.

    With `model`, a config directory, vLLM's loaders are run again and compared with the plan (needs vLLM and
    torch; TraceError when they do not run), with `speculative_config` when the plan has a draft model; `manifest` is
    compared with the sources that the plan has.
    Findings that the plan's waivers accept are among them; `rdtplan.verify.waived` tells.
    """
    from rdtplan.ir.plan import FleetPlan
    from rdtplan.verify import check_entries, check_loaders, verify_fleet

    whole = plan if isinstance(plan, FleetPlan) else load(plan)
    findings = verify_fleet(whole)
    if manifest is not None:
        findings += check_entries(whole, _entries(manifest))
    if model is not None and not any(f.code in ("RDT330", "RDT331") for f in findings):
        from rdtplan.compiler import recompile

        findings += check_loaders(whole, recompile(whole, model, speculative=speculative_config))
    return findings


def diff(before: FleetPlan | Path, after: FleetPlan | Path) -> PlanDiff:
    """Compare two plans, given as files or objects: causes, figures of the fleet, and effects on families of names.

    `PlanDiff.same` is equality of identities: the same bytes go to the same places under the same settings.
    """
    from contextlib import ExitStack

    from rdtplan.ir.file import PlanFile
    from rdtplan.ir.plan import FleetPlan
    from rdtplan.ir.view import PlanInMemory
    from rdtplan.report.compare import compare

    with ExitStack() as files:

        def view(plan: FleetPlan | Path) -> PlanView:
            return PlanInMemory(plan) if isinstance(plan, FleetPlan) else files.enter_context(PlanFile(plan))

        return compare(view(before), view(after))


def compile(
    config_dir: Path,
    manifest: Path | Iterable[SourceTensor] | None = None,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    data_parallel: int = 1,
    expert_parallel: bool = False,
    redundant_experts: int | None = None,
    expert_placement: Path | Placement | None = None,
    replicas: int = 1,
    trainer_ranks: int = 1,
    owners: Path | Sequence[OwnerRule] | None = None,
    settings: TransferSettings | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    target: str = "auto",
    waivers: Sequence[Waiver] = (),
    jobs: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> FleetPlan:
    """Compile the plan of a fleet from a Hugging Face config directory, offline. Needs vLLM and torch, no GPU.

    `manifest` is a checkpoint directory, a safetensors file or index, a JSON manifest, or source tensors; without it
    the names come from the config. `owners` is an owners file or its rules; without it every trainer rank holds
    everything. The sizes are those of one engine, of which there are `replicas`. `target` is the workers'
    platform (`cpu`, `sm80`, `sm90`, ...; `auto`: that of this machine), and `speculative_config` is vLLM's, when they
    hold a draft model too. With `redundant_experts` (0 is a number) they run with EPLB, and `expert_placement`, a JSON
    file or its rows, says which expert every slot holds; without it they hold those that vLLM starts with. `jobs`
    tracing processes run at once; `progress(stage, done, total)` is called meanwhile.

    InputError, TraceError or PlanError when there is no such plan; a plan that is returned is complete.
    """
    from rdtplan.compiler import Fleet, compile_plan
    from rdtplan.inputs.owners import read_owner_rules
    from rdtplan.ir.topology import InferenceTopology, TransferSettings

    if manifest is None:
        from rdtplan.inputs.config_manifest import manifest_from_config

        entries = manifest_from_config(config_dir)
    else:
        entries = _entries(manifest)
    rules = read_owner_rules(owners, trainer_ranks) if isinstance(owners, str | os.PathLike) else owners
    fleet = Fleet(
        topology=InferenceTopology(
            tensor_parallel, pipeline_parallel, data_parallel, expert_parallel, replicas, redundant_experts
        ),
        trainer_ranks=trainer_ranks,
        owner_rules=None if rules is None else tuple(rules),
        settings=settings or TransferSettings(),
        target=target,
        placement=None if expert_placement is None else _placement(expert_placement),
        waivers=tuple(waivers),
    )
    return compile_plan(
        config_dir,
        entries,
        fleet,
        dtype=dtype,
        quantization=quantization,
        speculative=speculative_config,
        jobs=jobs,
        progress=progress,
    )


def place_experts(plan: FleetPlan | Path, placement: Path | Placement) -> FleetPlan:
    """The same plan with its experts in other slots: for workers with EPLB, when it has moved them. Needs no vLLM.

    `placement` is a JSON file or its rows: the logical expert of every slot, in one row for all layers or by layer
    (leaf module). Nothing is traced again. InputError RDT120 when it does not fit; the plan that is returned is
    complete.
    """
    from rdtplan.compiler import place_experts
    from rdtplan.ir.plan import FleetPlan

    return place_experts(plan if isinstance(plan, FleetPlan) else load(plan), _placement(placement))


def _placement(given: Path | Placement) -> Placement:
    from rdtplan.inputs.experts import check_placement, read_placement

    return read_placement(given) if isinstance(given, str | os.PathLike) else check_placement(given, "placement")


def _entries(given: Path | Iterable[SourceTensor]) -> list[SourceTensor]:
    from rdtplan.errors import InputError
    from rdtplan.inputs.manifests import read_manifest
    from rdtplan.ir.manifest import SourceTensor

    if isinstance(given, str | os.PathLike):
        return read_manifest(given)
    entries = list(given)
    for k, entry in enumerate(entries):
        if not isinstance(entry, SourceTensor):
            raise InputError(
                f"manifest: entry {k} is {str(entry)[:60]}, a {type(entry).__name__}",
                fix="give a path, or entries of rdtplan.ir.manifest.SourceTensor",
                code="RDT104",
            )
    return entries
