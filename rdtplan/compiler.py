"""Compile a fleet plan: inputs, dry run, passes, verification, and the sealed result."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from rdtplan import __version__
from rdtplan.errors import InputError
from rdtplan.expected import expected, prediction_layers
from rdtplan.inputs.owners import OwnerRule, resolve_owners, resolve_pieces
from rdtplan.ir.digests import (
    consumer_digest,
    fleet_identity,
    geometry_digest,
    manifest_digest,
    ownership_digest,
    pair_digests,
)
from rdtplan.ir.experts import Placement
from rdtplan.ir.manifest import Ints, Manifest, Piece, SourceTensor, build_manifest
from rdtplan.ir.pieces import gathered_nbytes, whole_entries
from rdtplan.ir.plan import (
    Compiler,
    ConsumerPlan,
    FleetPlan,
    ModelIdentity,
    Overview,
    Program,
    Routing,
    Waiver,
)
from rdtplan.ir.targets import AUTO, CPU, TARGETS, check_target, may_be_target
from rdtplan.ir.topology import InferenceTopology, TransferSettings, positions
from rdtplan.ir.traces import Fetches, RankTrace
from rdtplan.ir.view import PlanInMemory, placement_of
from rdtplan.passes import run_passes
from rdtplan.passes.draft import Draft, ProgramDraft
from rdtplan.verify import refuse, verify_fleet


@frozen
class Fleet:
    """Everything about the two fleets that is not the model: the compiler's second input."""

    topology: InferenceTopology = field(factory=InferenceTopology)
    trainer_ranks: int = 1
    owner_rules: tuple[OwnerRule, ...] | None = None
    settings: TransferSettings = field(factory=TransferSettings)
    target: str = AUTO
    """What the workers run on (`rdtplan.ir.targets`)."""
    placement: Placement | None = None
    """With EPLB: the expert that every slot is to hold; None: that which vLLM puts there when it starts."""
    waivers: tuple[Waiver, ...] = ()


@frozen
class DryRun:
    """What a fleet is compiled from: its inputs, and what vLLM's loaders did on every distinct rank."""

    manifest: Manifest
    owners: tuple[Ints, ...]
    """Trainer ranks that hold each source name."""
    traces: Sequence[RankTrace]
    trace_of: Ints
    """By worker index of one replica: its trace."""
    fleet: Fleet
    model: ModelIdentity
    compiler: Compiler
    pieces: tuple[tuple[Piece, ...], ...] = ()
    """Boxes in which each source name is held; empty: its owners have all of it."""
    predicting: Sequence[str] = ()
    """Patterns of source names that only a draft model would load (`rdtplan.expected`), where the workers' draft model
    is not part of the plan."""


Progress = Callable[[str, int, int], None]
"""(stage, done, total)."""


def compile_plan(
    config_dir: str | os.PathLike[str],
    entries: Sequence[SourceTensor],
    fleet: Fleet,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    speculative: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> FleetPlan:
    """Compile the plan of a whole fleet from a Hugging Face config directory and the trainer's manifest.

    `speculative` is vLLM's speculative config, when the workers hold a draft model too. Needs vLLM and torch, no GPU.
    Raises InputError, TraceError or PlanError; a returned plan is complete.
    """
    found = dry_run(
        config_dir,
        entries,
        fleet,
        dtype=dtype,
        quantization=quantization,
        speculative=speculative,
        jobs=jobs,
        progress=progress,
    )
    return assemble(found, progress)


def recompile(
    plan: FleetPlan,
    config_dir: str | os.PathLike[str],
    *,
    speculative: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> FleetPlan:
    """What the loaders of the installed vLLM make of the inputs that a plan was compiled from; not verified.

    The plan says all of them but the configs. Raises InputError, TraceError, or PlanError where there is no plan.
    """
    from rdtplan.trace.watch import DRAFT

    drafted = any(m.startswith(DRAFT) for c in plan.consumers[:1] for m in c.program.parameters.module_names)
    if drafted != (speculative is not None):
        has, given = ("a draft model", "none is") if drafted else ("no draft model", "one is")
        raise InputError(
            f"the plan writes {has}, and {given} given to compare with",
            fix="give --speculative-config as the plan was compiled with it",
            code="RDT117",
        )
    fleet = Fleet(
        topology=plan.topology,
        trainer_ranks=plan.ownership.ranks,
        settings=plan.settings,
        target=plan.compiler.target,
        placement=placement_of(PlanInMemory(plan)) or None,
        waivers=plan.waivers,
    )
    found = dry_run(
        config_dir,
        whole_entries(plan.manifest, plan.ownership),
        fleet,
        dtype=plan.model.dtype,
        quantization=plan.model.quantization,
        speculative=speculative,
        jobs=jobs,
        progress=progress,
    )
    return plan_of(found)


def place_experts(plan: FleetPlan, placement: Placement) -> FleetPlan:
    """The plan of the same fleet with its experts placed anew: what its workers copied is what was traced.

    Needs neither vLLM nor torch, nor the model. InputError RDT120 for a placement that does not fit, PlanError for one
    that no complete plan exists for.
    """
    programs = list({id(c.program): c.program for c in plan.consumers}.values())
    index = {id(program): k for k, program in enumerate(programs)}
    width = plan.topology.workers_per_replica
    fleet = Fleet(
        topology=plan.topology,
        trainer_ranks=plan.ownership.ranks,
        settings=plan.settings,
        target=plan.compiler.target,
        placement=placement,
        waivers=plan.waivers,
    )
    placed = assemble(
        DryRun(
            plan.manifest,
            tuple(plan.ownership.owners(k) for k in range(len(plan.manifest))),
            [_traced(program) for program in programs],
            tuple(index[id(c.program)] for c in plan.consumers[:width]),
            fleet,
            plan.model,
            evolve(plan.compiler, rdtplan=__version__),
        )
    )
    return evolve(placed, notes=tuple(dict.fromkeys((*plan.notes, *placed.notes))))


def _traced(program: Program) -> RankTrace:
    """What a program does as its dry run left it, up to the order of what goes to different places."""
    keys, scatters, seen = program.keys, program.scatters, program.provenance
    return RankTrace(
        position=program.position,
        parameters=program.parameters,
        regions=program.regions,
        dtype_table=program.dtype_table,
        loaders=seen.loaders,
        chains=seen.chains,
        fetches=Fetches(
            sources=tuple(keys.source[key] for key in scatters.key),
            dtypes=tuple(keys.dtype[key] for key in scatters.key),
            source_regions=tuple(keys.region[key] for key in scatters.key),
            parameters=scatters.parameter,
            dest_regions=scatters.region,
            loaders=seen.scatter_loader,
            chains=seen.scatter_chain,
        ),
        fills=program.fills,
        fill_loaders=seen.fill_loader,
        untouched=program.untouched,
        untouched_reasons=program.untouched_reasons,
        operations=program.operations,
        leaves=program.leaves,
        expressions=program.expressions,
        operation_loaders=seen.operation_loader,
        experts=program.experts,
    )


def dry_run(
    config_dir: str | os.PathLike[str],
    entries: Sequence[SourceTensor],
    fleet: Fleet,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    speculative: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> DryRun:
    """Trace every worker rank. Arguments and errors as for `compile_plan`."""
    from rdtplan.trace.dry_run import TraceRequest
    from rdtplan.trace.process import trace_for_target

    check_fleet_input(fleet)
    manifest = build_manifest(entries)
    owners = resolve_owners(list(entries), fleet.owner_rules, fleet.trainer_ranks)
    pieces = resolve_pieces(list(entries), fleet.owner_rules, fleet.trainer_ranks)
    request = TraceRequest(str(config_dir), manifest, fleet.topology, dtype, quantization, fleet.target, speculative)
    report = None if progress is None else (lambda done, total: progress("tracing worker ranks", done, total))
    found = trace_for_target(request, jobs=jobs, progress=report)
    return DryRun(
        manifest,
        owners,
        found.traces,
        found.trace_of,
        fleet,
        found.model,
        Compiler(__version__, found.vllm, found.torch, found.target),
        pieces,
        () if speculative is not None else prediction_layers(found.config),
    )


def check_fleet_input(fleet: Fleet) -> None:
    """InputError RDT108 with all wrong settings at once."""
    if wrong := wrong_settings(fleet):
        raise InputError("; ".join(wrong), code="RDT108")
    if not may_be_target(fleet.target):
        check_target(fleet.target)


def wrong_settings(fleet: Fleet, spelled: Callable[[str], str] = str) -> list[str]:
    """What is wrong with the sizes and settings of a fleet, each by its name as it is `spelled` for the user."""
    t, s = fleet.topology, fleet.settings
    wrong = [
        f"{spelled(name)} must be {least} or more, is {value}"
        for name, value, least in (
            ("tensor_parallel", t.tensor_parallel, 1),
            ("pipeline_parallel", t.pipeline_parallel, 1),
            ("data_parallel", t.data_parallel, 1),
            ("replicas", t.replicas, 1),
            ("trainer_ranks", fleet.trainer_ranks, 1),
            ("num_rdt_buffers", s.num_rdt_buffers, 1),
            ("stages_in_flight", s.stages_in_flight, 1),
            ("gather_lookahead", s.gather_lookahead, 0),
            ("buffer_presize_gb", s.buffer_presize_gb, 0),
            ("max_chunk_bytes", s.max_chunk_bytes, 0),
            ("redundant_experts", t.redundant_experts or 0, 0),
        )
        if not least <= value < math.inf
    ]
    if s.staging_device not in ("gpu", "host"):
        wrong.append(f"{spelled('staging_device')} must be gpu or host, is {s.staging_device!r}")
    if wrong and not may_be_target(fleet.target):
        wrong.append(f"{spelled('target')} must be one of {', '.join((AUTO, CPU, *TARGETS))}, is {fleet.target!r}")
    return wrong


def assemble(found: DryRun, progress: Progress | None = None) -> FleetPlan:
    """Run the passes over a dry run and verify the result; needs no torch. PlanError if incomplete."""
    note = progress or (lambda *_: None)
    note("planning", 0, 2)
    plan = plan_of(found)
    note("planning", 1, 2)
    findings = verify_fleet(plan)
    refuse(findings, plan.waivers)
    note("planning", 2, 2)
    remarks = tuple(f.sentence for f in findings if f.severity == "note")
    return evolve(plan, notes=(*plan.notes, *remarks)) if remarks else plan


def plan_of(found: DryRun) -> FleetPlan:
    """Run the passes over a dry run; what they give may be incomplete."""
    fleet = found.fleet
    draft = run_passes(
        Draft(
            manifest=found.manifest,
            owners=found.owners,
            trainer_ranks=fleet.trainer_ranks,
            topology=fleet.topology,
            settings=fleet.settings,
            programs=tuple(ProgramDraft(t) for t in found.traces),
            program_of=found.trace_of,
            pieces=found.pieces,
            placement=fleet.placement,
        )
    )
    ours = expected(found.manifest, found.traces, found.predicting)
    waivers = (*fleet.waivers, *(w for w in ours.waivers if w not in fleet.waivers))
    plan = _seal(draft, evolve(fleet, waivers=waivers), found.model, found.compiler)
    return evolve(plan, notes=(*plan.notes, *ours.notes))


def _program(draft: ProgramDraft, waivers: tuple[Waiver, ...]) -> Program:
    from fnmatch import fnmatchcase

    trace = draft.trace
    assert draft.provenance is not None and draft.keys is not None and draft.scatters is not None
    assert draft.chunks is not None and draft.lifetimes is not None
    touched = {*trace.fetches.parameters, *trace.fills.parameters, *trace.operations.parameters}
    untouched = dict(zip(trace.untouched, trace.untouched_reasons or ("",) * len(trace.untouched), strict=True))
    untouched |= dict(zip(trace.kept, trace.kept_reasons, strict=True))
    for k, name in enumerate(trace.parameters.names):
        accepted = [w.pattern for w in waivers if w.code == "RDT310" and fnmatchcase(name, w.pattern)]
        if k not in touched and accepted and name not in untouched:
            untouched[name] = f"accepted: --waive RDT310:{accepted[0]}"
    names = tuple(sorted(untouched, key=lambda name: not untouched[name].startswith("accepted")))
    return Program(
        position=trace.position,
        geometry_digest=geometry_digest(trace.parameters),
        dtype_table=trace.dtype_table,
        untouched=names,
        untouched_reasons=tuple(untouched[name] for name in names),
        parameters=trace.parameters,
        regions=trace.regions,
        keys=draft.keys,
        scatters=draft.scatters,
        chunks=draft.chunks,
        fills=trace.fills,
        lifetimes=draft.lifetimes,
        free_after=draft.free_after,
        provenance=draft.provenance,
        operations=trace.operations,
        leaves=trace.leaves,
        expressions=trace.expressions,
        experts=trace.experts,
    )


def _seal(draft: Draft, fleet: Fleet, model: ModelIdentity, compiler: Compiler) -> FleetPlan:
    assert draft.ownership is not None and draft.memory is not None
    topology = draft.topology
    programs = [_program(p, fleet.waivers) for p in draft.programs]
    routings = [
        Routing(r.producer, r.seq, pair_digests(draft.manifest, programs[p], r.producer))
        for r, p in zip(draft.routes, draft.program_of, strict=True)
    ]
    digests = [consumer_digest(programs[p], r) for p, r in zip(draft.program_of, routings, strict=True)]
    consumers = tuple(
        ConsumerPlan(
            replica * topology.workers_per_replica + w,
            replica,
            position,
            digests[w],
            programs[draft.program_of[w]],
            routings[w],
        )
        for replica in range(topology.replicas)
        for w, position in enumerate(positions(topology))
    )
    plan = FleetPlan(
        compiler=compiler,
        model=model,
        topology=topology,
        settings=draft.settings,
        overview=_overview(draft, consumers),
        memory=draft.memory,
        notes=draft.notes,
        waivers=fleet.waivers,
        identity="",
        manifest_digest=manifest_digest(draft.manifest),
        ownership_digest=ownership_digest(draft.ownership),
        manifest=draft.manifest,
        ownership=draft.ownership,
        groups=draft.groups,
        consumers=consumers,
        producers=draft.producers,
    )
    return evolve(plan, identity=fleet_identity(plan))


def _overview(draft: Draft, consumers: tuple[ConsumerPlan, ...]) -> Overview:
    assert draft.ownership is not None
    served = [0] * draft.trainer_ranks
    pulls = [0] * draft.trainer_ranks
    for c in consumers:
        for producer, nbytes in zip(c.routing.producer, c.program.chunks.nbytes, strict=True):
            served[producer] += nbytes
            pulls[producer] += 1
    return Overview(
        source_names=len(draft.manifest),
        manifest_nbytes=sum(g.nbytes for g in draft.groups),
        pulled_nbytes=tuple(sum(c.program.chunks.nbytes) for c in consumers),
        pulls=tuple(len(c.program.chunks) for c in consumers),
        scatters=tuple(len(c.program.scatters) for c in consumers),
        streams=tuple(len(set(c.program.chunks.stream)) for c in consumers),
        parameters=tuple(c.program.parameters.held for c in consumers),
        served_nbytes=tuple(served),
        served_pulls=tuple(pulls),
        gathered_nbytes=gathered_nbytes(draft.manifest, draft.ownership),
    )
