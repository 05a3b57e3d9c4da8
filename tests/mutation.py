"""Ways in which weight sync is known to go silently wrong, each applied to a good plan, manifest, loader, worker or
trainer, and who refuses it.

A plan is changed before the passes run, in the traces that they take: what comes out has every chunk, lifetime, signal
and digest in order and says something wrong, as a plan would whose compiler had that bug. Where the incident is in what
the passes make (a signal, an order, an owner) the finished plan is changed and its digests are computed anew. Loaders
are vLLM's own with one method replaced. Nothing is stood in for but what the CPU build of vLLM lacks.

`tests/mutations.py` is the table, `refusal` says how one of them ends, `tools/mutations.py` prints all of them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import drafts
import oracle
import torch
from architectures import cpu_stand_ins
from attrs import evolve, field, frozen
from forgery import with_digests

from rdtplan.compiler import DryRun, Fleet, compile_plan, dry_run, plan_of, recompile
from rdtplan.errors import RdtError
from rdtplan.ir.file import PlanFile, write_plan
from rdtplan.ir.manifest import Ints, Manifest, SourceTensor
from rdtplan.ir.plan import FleetPlan, Waiver
from rdtplan.ir.regions import Region
from rdtplan.ir.topology import InferenceTopology, Position
from rdtplan.ir.traces import Fetches, RankTrace
from rdtplan.verify import check_entries, check_loaders, refuse, verify_fleet

# -- what is mutated ---------------------------------------------------------------------------------------------


@frozen
class Subject:
    """A fleet of a small real model."""

    corpus: str
    topology: InferenceTopology = field(factory=InferenceTopology)
    trainer_ranks: int = 1
    config: dict[str, Any] = field(factory=dict)
    """What is changed of the corpus config."""
    waivers: tuple[Waiver, ...] = ()
    speculative: dict[str, Any] | None = None
    """vLLM's speculative config; the checkpoint then has a prediction layer."""
    staged: bool = False
    """Trainer rank 0 holds layer 0 and the embedding, rank 1 the rest."""

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.topology, self.trainer_ranks, waivers=self.waivers)


SUBJECTS = {
    "moe": Subject("Qwen3MoeForCausalLM@odd", InferenceTopology(2, replicas=2), 2),
    "moe, one rank": Subject("Qwen3MoeForCausalLM@odd"),
    "moe, two stages": Subject("Qwen3MoeForCausalLM@odd", InferenceTopology(2), 2, staged=True),
    "moe, experts spread": Subject("Qwen3MoeForCausalLM", InferenceTopology(2, expert_parallel=True)),
    "moe, data-parallel": Subject("Qwen3MoeForCausalLM@odd", InferenceTopology(2, data_parallel=2)),
    "fp8": Subject("Qwen3ForCausalLM@fp8", InferenceTopology(2), waivers=(Waiver("RDT310", "*.attn.*_scale"),)),
    "mamba": Subject("Mamba2ForCausalLM@g1", InferenceTopology(2)),
    "buffers": Subject("ApertusForCausalLM"),
    "tied, two stages": Subject("LlamaForCausalLM@tied", InferenceTopology(pipeline_parallel=2)),
    "tied, two by two": Subject("LlamaForCausalLM@tied", InferenceTopology(2, 2)),
    "draft": Subject(drafts.MLA, speculative={"method": "mtp", "num_speculative_tokens": 1}),
}


class Good:
    """A subject, compiled once: its dry run, its plan, and what its loaders do when they are run again."""

    def __init__(self, subject: Subject, directory: Path) -> None:
        self.subject = subject
        self.entries = tuple(oracle.corpus_manifest(subject.corpus))
        if subject.staged:
            first = ("model.layers.0.", "model.embed_tokens.")
            self.entries = tuple(evolve(e, owners=(0,) if e.name.startswith(first) else (1,)) for e in self.entries)
        directory = Path(tempfile.mkdtemp(dir=directory))
        self.config_dir = oracle.corpus_config(subject.corpus, directory)
        config = json.loads((self.config_dir / "config.json").read_text())
        if subject.speculative is not None:
            config, entries = drafts.target("mtp")
            self.entries = tuple(entries)
        (self.config_dir / "config.json").write_text(json.dumps(config | subject.config))
        self.found = dry_run(self.config_dir, self.entries, subject.fleet, speculative=subject.speculative, jobs=1)

    @functools.cached_property
    def plan(self) -> FleetPlan:
        plan = plan_of(self.found)
        refuse(verify_fleet(plan), plan.waivers)
        return plan

    @functools.cached_property
    def fresh(self) -> FleetPlan:
        """The loaders run again on what the plan says of itself."""
        return recompile(self.plan, self.config_dir, speculative=self.subject.speculative, jobs=1)

    def loaders_do(self, plan: FleetPlan) -> FleetPlan:
        """What the loaders do with the inputs that `plan` names; tracing is deterministic: equal inputs trace once."""
        inputs = [(p.manifest, p.ownership, p.topology, p.settings, p.model, p.waivers) for p in (plan, self.plan)]
        if inputs[0] == inputs[1]:
            return self.fresh
        return recompile(plan, self.config_dir, speculative=self.subject.speculative, jobs=1)

    def compile(self, entries: Iterable[SourceTensor] | None = None, fleet: Fleet | None = None) -> FleetPlan:
        s = self.subject
        given = list(entries or self.entries)
        return compile_plan(self.config_dir, given, fleet or s.fleet, speculative=s.speculative, jobs=1)


class Bench:
    """Good plans to mutate. A process has one, for its lifetime: vLLM is imported with what its CPU build lacks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._good: dict[str, Good] = {}
        self._stand_ins = contextlib.ExitStack()
        self._stand_ins.enter_context(cpu_stand_ins())

    def good(self, name: str) -> Good:
        if name not in self._good:
            self._good[name] = Good(SUBJECTS[name], self.directory)
        return self._good[name]


# -- what refuses it ---------------------------------------------------------------------------------------------

Judge = Callable[[Good, Any, Bench], None]
"""Applies a mutation and raises the RdtError that refuses it, or returns: nobody has seen it."""


def verified(good: Good, change: Callable[[DryRun], DryRun], bench: Bench) -> None:
    """The plan of changed traces, written and read, by `rdtplan verify PLAN`."""
    _verify(plan_of(change(good.found)), bench)


def verified_sealed(good: Good, change: Callable[[FleetPlan], FleetPlan], bench: Bench) -> None:
    """The changed plan, sealed again, by `rdtplan verify PLAN`."""
    _verify(with_digests(change(good.plan)), bench)


def verified_with_loaders(good: Good, change: Callable[[DryRun], DryRun], bench: Bench) -> None:
    """A plan that is sound by itself, by `rdtplan verify PLAN --model DIR`."""
    plan = plan_of(change(good.found))
    _verify(plan, bench)
    refuse(check_loaders(plan, good.loaders_do(plan)))


def verified_with_manifest(good: Good, change: Callable[[DryRun], DryRun], bench: Bench) -> None:
    """A plan that its own inputs explain, by `rdtplan verify PLAN --manifest CHECKPOINT`."""
    plan = plan_of(change(good.found))
    _verify(plan, bench)
    refuse(check_loaders(plan, good.loaders_do(plan)))
    refuse(check_entries(plan, good.entries))


def compiled(good: Good, change: Callable[[list[SourceTensor]], list[SourceTensor]], bench: Bench) -> None:
    """Another manifest, by `rdtplan compile`."""
    good.compile(change(list(good.entries)))


def owned(good: Good, change: Callable[[DryRun], DryRun], bench: Bench) -> None:
    """Other owners, by `rdtplan compile`."""
    plan = plan_of(change(good.found))
    refuse(verify_fleet(plan), plan.waivers)


def compiled_with_loader(
    good: Good, change: Callable[[], contextlib.AbstractContextManager[Any]], bench: Bench
) -> None:
    """A vLLM whose loader has the bug, by `rdtplan compile`."""
    with change():
        good.compile()


def attached_to_worker(good: Good, change: Callable[[torch.nn.Module], None], bench: Bench) -> None:
    """A live worker's model, when it loads the plan."""
    from rdtexec.destination import Destination

    rank = oracle.Rank(good.config_dir, good.subject.topology, Position(0, 0, 0))
    with rank.model(meta=True) as model:
        change(model)
        Destination(model, good.plan.consumers[0].program)


def loaded_by_worker(good: Good, change: Callable[[FleetPlan], tuple[FleetPlan, int, Position]], bench: Bench) -> None:
    """A worker that loads its part of the plan, saying where it stands."""
    from rdtexec.plans import load_worker

    plan, consumer, position = change(good.plan)
    write_plan(plan, bench.directory / "worker.plan")
    load_worker(bench.directory / "worker.plan", consumer, position=position)


def attached_to_trainer(good: Good, change: Callable[[list[Declared]], list[Declared]], bench: Bench) -> None:
    """A live trainer's declaration, when it loads the plan."""
    from rdtexec.plans import check_live_manifest, load_trainer

    write_plan(good.plan, bench.directory / "trainer.plan")
    declared = [Declared(e.name, e.dtype, e.shape) for e in good.entries]
    trainer = load_trainer(bench.directory / "trainer.plan", 0)
    check_live_manifest(trainer, Trainer(change(declared)))


@frozen
class Declared:
    """A tensor as a trainer declares it; without `owners` every rank holds it."""

    name: str
    dtype: str
    shape: Ints
    owners: Ints | None = None


@frozen
class Trainer:
    """What a trainer rank declares to vLLM 0.33: a `WeightSource` as far as the check of a plan looks at it."""

    metadata: list[Declared]


def _verify(plan: FleetPlan, bench: Bench) -> None:
    path = bench.directory / "mutated.plan"
    write_plan(plan, path)
    with PlanFile(path) as file:
        again = file.fleet()
    refuse(verify_fleet(again), again.waivers)


COMMANDS: dict[Judge, str] = {
    verified: "verify",
    verified_sealed: "verify",
    verified_with_loaders: "verify --model",
    verified_with_manifest: "verify --manifest",
    compiled: "compile",
    owned: "compile",
    compiled_with_loader: "compile",
    attached_to_worker: "worker init",
    loaded_by_worker: "worker init",
    attached_to_trainer: "trainer init",
}


@frozen
class Mutation:
    """One way to go wrong."""

    name: str
    incident: str
    """What really happens."""
    applied_to: str
    subject: str
    judge: Judge
    code: str
    change: Any
    """What `judge` applies."""

    @property
    def caught_by(self) -> str:
        return COMMANDS[self.judge]


def refusal(mutation: Mutation, bench: Bench) -> RdtError | None:
    """The error that refuses a mutation; None: it went through."""
    good = bench.good(mutation.subject)
    try:
        mutation.judge(good, mutation.change, bench)
    except RdtError as error:
        return error
    return None


def passes_unmutated(mutation: Mutation, bench: Bench) -> bool:
    """The same judge lets the subject through as it is."""
    same: dict[Judge, Any] = {
        compiled_with_loader: contextlib.nullcontext,
        attached_to_worker: lambda model: None,
        loaded_by_worker: lambda plan: (plan, 0, plan.consumers[0].position),
    }
    unmutated = evolve(mutation, change=same.get(mutation.judge, lambda x: x))
    key = (mutation.judge, mutation.subject)
    if key not in _SEEN_TO_PASS and refusal(unmutated, bench) is None:
        _SEEN_TO_PASS.add(key)
    return key in _SEEN_TO_PASS


_SEEN_TO_PASS: set[tuple[Judge, str]] = set()

MUTATIONS: list[Mutation] = []


def mutation(
    name: str, incident: str, subject: str, judge: Judge, code: str, applied_to: str = ""
) -> Callable[[Any], Any]:
    """Enter the decorated change into the table."""
    where = (
        applied_to
        or {
            verified: "traces",
            verified_with_loaders: "traces",
            verified_with_manifest: "traces",
            verified_sealed: "plan",
            compiled: "manifest",
            owned: "owners",
            compiled_with_loader: "loader",
            attached_to_worker: "live model",
            loaded_by_worker: "worker",
            attached_to_trainer: "live trainer",
        }[judge]
    )

    def enter(change: Any) -> Any:
        MUTATIONS.append(Mutation(name, incident, where, subject, judge, code, change))
        return change

    return enter


# -- how traces are changed --------------------------------------------------------------------------------------


@frozen
class Copy:
    """One recorded copy, with names for numbers."""

    source: str
    dtype: str
    taken: Region
    parameter: str
    dest: Region
    loader: int
    chain: int


def copies_of(trace: RankTrace, manifest: Manifest) -> list[Copy]:
    f, names = trace.fetches, trace.parameters.names
    return [
        Copy(
            manifest.names[source],
            trace.dtype_table[dtype],
            trace.regions[taken],
            names[parameter],
            trace.regions[dest],
            loader,
            chain,
        )
        for source, dtype, taken, parameter, dest, loader, chain in zip(
            f.sources, f.dtypes, f.source_regions, f.parameters, f.dest_regions, f.loaders, f.chains, strict=True
        )
    ]


def with_copies(trace: RankTrace, manifest: Manifest, rows: list[Copy]) -> RankTrace:
    regions = {r: i for i, r in enumerate(trace.regions)}
    dtypes = {d: i for i, d in enumerate(trace.dtype_table)}
    sources = {n: k for k, n in enumerate(manifest.names)}
    columns = [
        (
            sources[c.source],
            dtypes.setdefault(c.dtype, len(dtypes)),
            regions.setdefault(c.taken, len(regions)),
            trace.parameters.names.index(c.parameter),
            regions.setdefault(c.dest, len(regions)),
            c.loader,
            c.chain,
        )
        for c in rows
    ]
    fetches = Fetches(*zip(*columns, strict=True)) if columns else Fetches((), (), (), (), (), (), ())
    return evolve(trace, regions=tuple(regions), dtype_table=tuple(dtypes), fetches=fetches)


def on_workers(found: DryRun, change: Callable[[RankTrace], RankTrace], workers: Iterable[int] | None = None) -> DryRun:
    """Change the traces of some workers of an engine, all unless given; those who share one are taken apart."""
    traces, trace_of = list(found.traces), list(found.trace_of)
    if workers is None:
        return evolve(found, traces=tuple(map(change, traces)))
    for worker in workers:
        traces.append(change(traces[trace_of[worker]]))
        trace_of[worker] = len(traces) - 1
    used = sorted(set(trace_of))
    return evolve(found, traces=tuple(traces[t] for t in used), trace_of=tuple(used.index(t) for t in trace_of))


def with_rows(
    change: Callable[[Copy], Copy | None], workers: Iterable[int] | None = None
) -> Callable[[DryRun], DryRun]:
    """Change or drop copies one by one."""

    def apply(found: DryRun) -> DryRun:
        def edit(trace: RankTrace) -> RankTrace:
            rows = [c for c in map(change, copies_of(trace, found.manifest)) if c is not None]
            return with_copies(trace, found.manifest, rows)

        return on_workers(found, edit, workers)

    return apply


def exchanged(a: str, b: str, within: str = "", workers: Iterable[int] | None = None) -> Callable[[DryRun], DryRun]:
    """Copies that take from a source with `a` in its name take from the one with `b`, and the other way round."""

    def swap(c: Copy) -> Copy:
        if within not in c.source:
            return c
        marked = c.source.replace(a, "\0").replace(b, a).replace("\0", b)
        return evolve(c, source=marked)

    return with_rows(swap, workers)


def drop(parameter: str, source: str = "", workers: Iterable[int] | None = None) -> Callable[[DryRun], DryRun]:
    return with_rows(lambda c: None if c.parameter.endswith(parameter) and source in c.source else c, workers)


def as_rank_0(parameter: str, worker: int) -> Callable[[DryRun], DryRun]:
    """What `worker` takes for a parameter is what worker 0 takes."""

    def apply(found: DryRun) -> DryRun:
        first = copies_of(found.traces[found.trace_of[0]], found.manifest)
        taken = {(c.parameter, c.source, c.dest): c.taken for c in first}
        return with_rows(
            lambda c: (
                evolve(c, taken=taken.get((c.parameter, c.source, c.dest), c.taken))
                if c.parameter.endswith(parameter)
                else c
            ),
            [worker],
        )(found)

    return apply
