"""Synthetic plans for tests, without torch: traces as a dry run would leave them, fleets, and what must hold
of them.

The model is a small decoder with the shapes that matter: a fused `qkv_proj` (row shards, replicated KV heads,
a bias), a column-sharded `o_proj`, dense layers, mixture-of-experts layers with fused expert weights (sharded
by TP or by EP), a transposed parameter, float32 parameters, and a vocabulary that is padded and filled.
Traces are complete, so every plan made from them passes verification.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import accumulate, product
from typing import Any

from attrs import evolve, field, frozen
from hypothesis import strategies as st

from rdtplan.compiler import DryRun, Fleet, assemble
from rdtplan.ir.experts import Experts
from rdtplan.ir.manifest import Ints, Manifest, SourceTensor, build_manifest
from rdtplan.ir.plan import Compiler, FleetPlan, ModelIdentity
from rdtplan.ir.regions import Region, canonical, contiguous_stride
from rdtplan.ir.topology import InferenceTopology, Position, TransferSettings, positions
from rdtplan.ir.traces import Fetches, Fills, Parameters, RankTrace
from rdtplan.passes import run_passes
from rdtplan.passes.draft import Draft, ProgramDraft

MODEL = ModelIdentity("SyntheticForCausalLM", "bfloat16", None, "0" * 64)
COMPILER = Compiler("0.1.0", "0.32.0", "2.11.0", "cpu")


# -- the model -----------------------------------------------------------------------------------------------


@frozen
class View:
    """A view of one tensor: what torch would give for the same calls on meta."""

    shape: Ints
    stride: Ints
    offset: int = 0

    @staticmethod
    def full(shape: Ints) -> View:
        return View(shape, contiguous_stride(shape))

    def narrow(self, dim: int, start: int, length: int) -> View:
        assert 0 <= start and start + length <= self.shape[dim]
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return View(shape, self.stride, self.offset + start * self.stride[dim])

    def select(self, dim: int, index: int) -> View:
        v = self.narrow(dim, index, 1)
        return View(v.shape[:dim] + v.shape[dim + 1 :], v.stride[:dim] + v.stride[dim + 1 :], v.offset)

    def t(self) -> View:
        return View(self.shape[::-1], self.stride[::-1], self.offset)

    @property
    def region(self) -> Region:
        return canonical(self.shape, self.stride, self.offset)


def elements(region: Region | View) -> list[int]:
    """Storage offsets in logical order, one by one."""
    return [
        region.offset + sum(i * s for i, s in zip(index, region.stride, strict=True))
        for index in product(*(range(n) for n in region.shape))
    ]


@frozen
class Sizes:
    """A model. Heads, experts and intermediate sizes are multiples of what shards them."""

    layers: int = 2
    dense_layers: int = 1
    hidden: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 2
    intermediate: int = 8
    experts: int = 4
    vocab: int = 11
    vocab_padding: int = 4
    bias: bool = True
    tied: bool = False


def source_entries(m: Sizes) -> list[SourceTensor]:
    """The checkpoint, in natural order."""
    h, q, kv = m.hidden, m.heads * m.head_dim, m.kv_heads * m.head_dim
    found = [("model.embed_tokens.weight", (m.vocab, h), "bfloat16")]
    for layer in range(m.layers):
        at = f"model.layers.{layer}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            found.append((f"{at}self_attn.{name}_proj.weight", (rows, h), "bfloat16"))
            if m.bias:
                found.append((f"{at}self_attn.{name}_proj.bias", (rows,), "bfloat16"))
        found.append((f"{at}self_attn.o_proj.weight", (h, q), "bfloat16"))
        if layer < m.dense_layers:
            prefixes = [f"{at}mlp."]
        else:
            prefixes = [f"{at}mlp.experts.{e}." for e in range(m.experts)]
            found.append((f"{at}mlp.gate.weight", (m.experts, h), "bfloat16"))
            found.append((f"{at}mlp.gate.e_score_correction_bias", (m.experts,), "float32"))
        for prefix in prefixes:
            found.append((f"{prefix}gate_proj.weight", (m.intermediate, h), "bfloat16"))
            found.append((f"{prefix}up_proj.weight", (m.intermediate, h), "bfloat16"))
            found.append((f"{prefix}down_proj.weight", (h, m.intermediate), "bfloat16"))
        found.append((f"{at}input_layernorm.weight", (h,), "bfloat16"))
    found.append(("model.norm.weight", (h,), "bfloat16"))
    if not m.tied:
        found.append(("lm_head.weight", (m.vocab, h), "bfloat16"))
    return [SourceTensor(name, dtype, shape) for name, shape, dtype in found]


@frozen
class Write:
    """One recorded copy before any canonical form: what the plan must still do, element for element."""

    source: int
    source_view: View
    parameter: int
    dest_view: View


@frozen
class Loader:
    """Stands for the model and its loaders while they run."""

    manifest: Manifest
    names: list[str] = field(factory=list)
    modules: list[str] = field(factory=list)
    dtypes: list[str] = field(factory=list)
    shapes: list[Ints] = field(factory=list)
    aliases: list[tuple[str, ...]] = field(factory=list)
    writes: list[Write] = field(factory=list)
    fills: list[tuple[int, View, float, int]] = field(factory=list)
    slots: list[tuple[int, int]] = field(factory=list)
    """With EPLB: (parameter, its first slot)."""
    placed: dict[str, Ints] = field(factory=dict)
    """With EPLB: layer -> expert of every slot."""

    def parameter(self, module: str, name: str, shape: Ints, dtype: str = "bfloat16", *aliases: str) -> int:
        self.names.append(f"{module}.{name}")
        self.modules.append(module)
        self.dtypes.append(dtype)
        self.shapes.append(shape)
        self.aliases.append(aliases)
        return len(self.names) - 1

    def view(self, parameter: int) -> View:
        return View.full(self.shapes[parameter])

    def source(self, name: str) -> tuple[int, View]:
        k = self.manifest.names.index(name)
        return k, View.full(self.manifest.shape(k))

    def copy(self, source: int, source_view: View, parameter: int, dest_view: View) -> None:
        assert source_view.shape == dest_view.shape
        self.writes.append(Write(source, source_view, parameter, dest_view))

    def fill(self, parameter: int, view: View, value: float) -> None:
        before = int(all(w.parameter != parameter for w in self.writes))
        self.fills.append((parameter, view, value, before))

    def trace(self, position: Position) -> RankTrace:
        regions: dict[Region, int] = {}
        dtypes: dict[str, int] = {}
        modules: dict[str, int] = {m: i for i, m in enumerate(dict.fromkeys(self.modules))}
        rows = [
            (
                w.source,
                dtypes.setdefault(self.manifest.dtype(w.source), len(dtypes)),
                regions.setdefault(w.source_view.region, len(regions)),
                w.parameter,
                regions.setdefault(w.dest_view.region, len(regions)),
                w.parameter % 2,
                0,
            )
            for w in self.writes
        ]
        fills = [(p, regions.setdefault(v.region, len(regions)), x, b) for p, v, x, b in self.fills]
        return RankTrace(
            position=position,
            parameters=Parameters(
                names=tuple(self.names),
                modules=tuple(modules[m] for m in self.modules),
                dtypes=tuple(self.dtypes),
                shapes=tuple(self.shapes),
                strides=tuple(contiguous_stride(s) for s in self.shapes),
                kinds=("parameter",) * len(self.names),
                aliases=tuple(self.aliases),
                module_names=tuple(modules),
            ),
            regions=tuple(regions),
            dtype_table=tuple(dtypes),
            loaders=("weight_loader (linear.py:1)", "default_weight_loader (utils.py:2)"),
            chains=(("narrow(0, 0, 4)",),),
            fetches=Fetches(*_columns(rows, 7)),
            fills=Fills(*_columns(fills, 4)),
            fill_loaders=(0,) * len(fills),
            untouched=("model.rotary_emb.cos_sin_cache",),
            experts=self.experts(),
        )

    def experts(self) -> Experts:
        layers = list(self.placed)
        flat = tuple(expert for row in self.placed.values() for expert in row)
        return Experts(
            modules=tuple(layers),
            logical=tuple(len(set(row)) for row in self.placed.values()),
            slot_end=tuple(accumulate(map(len, self.placed.values()))),
            experts=flat,
            initial=flat,
            parameters=tuple(p for p, _ in self.slots),
            layers=tuple(layers.index(self.modules[p]) for p, _ in self.slots),
            first=tuple(first for _, first in self.slots),
        )


def _columns(rows: list[tuple[Any, ...]], width: int) -> list[tuple[Any, ...]]:
    return [tuple(row[i] for row in rows) for i in range(width)]


def _stage(layers: int, pp: int, size: int) -> range:
    return range(pp * layers // size, (pp + 1) * layers // size)


def first_placement(m: Sizes, topology: InferenceTopology) -> Ints:
    """The expert of every slot as the loaders have it: all once, then from the first on again."""
    return tuple(slot % m.experts for slot in range(m.experts + (topology.redundant_experts or 0)))


def load(
    m: Sizes,
    manifest: Manifest,
    topology: InferenceTopology,
    position: Position,
    placement: Mapping[str, Ints] | None = None,
) -> Loader:
    """Run the loaders of one worker rank, with EPLB by another map than their own when it is given."""
    out = Loader(manifest)
    tp, rank = topology.tensor_parallel, position.tp
    first, last = position.pp == 0, position.pp == topology.pipeline_parallel - 1
    if first:
        aliases = ("lm_head.weight",) if m.tied else ()
        _vocabulary(out, m, "model.embed_tokens", tp, rank, *aliases)
    for layer in _stage(m.layers, position.pp, topology.pipeline_parallel):
        at = f"model.layers.{layer}"
        _attention(out, m, at, tp, rank)
        if layer < m.dense_layers:
            _dense(out, m, at, tp, rank)
        else:
            row = first_placement(m, topology)
            row = placement[f"{at}.mlp.experts"] if placement else row
            _experts(out, m, at, topology, position, row)
        _whole(out, f"{at}.input_layernorm", "weight")
    if last:
        _whole(out, "model.norm", "weight")
        if not m.tied:
            _vocabulary(out, m, "lm_head", tp, rank)
    return out


def _whole(out: Loader, module: str, name: str) -> None:
    k, source = out.source(f"{module}.{name}")
    p = out.parameter(module, name, source.shape, out.manifest.dtype(k))
    out.copy(k, source, p, out.view(p))


def _vocabulary(out: Loader, m: Sizes, module: str, tp: int, rank: int, *aliases: str) -> None:
    per_rank = -(-m.vocab // (m.vocab_padding * tp)) * m.vocab_padding
    k, source = out.source(f"{module}.weight")
    p = out.parameter(module, "weight", (per_rank, m.hidden), "bfloat16", *aliases)
    start = min(rank * per_rank, m.vocab)
    real = min(per_rank, m.vocab - start)
    if real:
        out.copy(k, source.narrow(0, start, real), p, out.view(p).narrow(0, 0, real))
    if real < per_rank:
        out.fill(p, out.view(p).narrow(0, real, per_rank - real), 0.0)


def _attention(out: Loader, m: Sizes, at: str, tp: int, rank: int) -> None:
    q_rows = m.heads // tp * m.head_dim
    kv_rows = max(1, m.kv_heads // tp) * m.head_dim
    kv_rank = rank if m.kv_heads >= tp else rank * m.kv_heads // tp
    qkv, rows = f"{at}.self_attn.qkv_proj", q_rows + 2 * kv_rows
    kinds = ("weight", "bias") if m.bias else ("weight",)
    params = {kind: out.parameter(qkv, kind, (rows, m.hidden) if kind == "weight" else (rows,)) for kind in kinds}
    shards = (
        ("q", rank, 0, q_rows),
        ("k", kv_rank, q_rows, kv_rows),
        ("v", kv_rank, q_rows + kv_rows, kv_rows),
    )
    for name, shard, begin, length in shards:
        for kind, p in params.items():
            k, source = out.source(f"{at}.self_attn.{name}_proj.{kind}")
            out.copy(k, source.narrow(0, shard * length, length), p, out.view(p).narrow(0, begin, length))
    k, source = out.source(f"{at}.self_attn.o_proj.weight")
    width = m.heads * m.head_dim // tp
    p = out.parameter(f"{at}.self_attn.o_proj", "weight", (m.hidden, width))
    out.copy(k, source.narrow(1, rank * width, width), p, out.view(p))


def _dense(out: Loader, m: Sizes, at: str, tp: int, rank: int) -> None:
    n = m.intermediate // tp
    p = out.parameter(f"{at}.mlp.gate_up_proj", "weight", (2 * n, m.hidden))
    for i, name in enumerate(("gate", "up")):
        k, source = out.source(f"{at}.mlp.{name}_proj.weight")
        out.copy(k, source.narrow(0, rank * n, n), p, out.view(p).narrow(0, i * n, n))
    k, source = out.source(f"{at}.mlp.down_proj.weight")
    p = out.parameter(f"{at}.mlp.down_proj", "weight", (n, m.hidden))
    out.copy(k, source.narrow(1, rank * n, n), p, out.view(p).t())


def _experts(out: Loader, m: Sizes, at: str, topology: InferenceTopology, position: Position, placed: Ints) -> None:
    _whole(out, f"{at}.mlp.gate", "weight")
    _whole(out, f"{at}.mlp.gate", "e_score_correction_bias")
    if topology.expert_parallel:
        ways = topology.tensor_parallel * topology.data_parallel
        mine = position.dp * topology.tensor_parallel + position.tp
        local, n, shard = _stage(len(placed), mine, ways), m.intermediate, 0
    else:
        n = m.intermediate // topology.tensor_parallel
        local, shard = range(len(placed)), position.tp
    module = f"{at}.mlp.experts"
    w13 = out.parameter(module, "w13_weight", (len(local), 2 * n, m.hidden))
    w2 = out.parameter(module, "w2_weight", (len(local), m.hidden, n))
    if topology.redundant_experts is not None:
        out.placed[module] = placed
        out.slots.extend((p, local.start) for p in (w13, w2))
    for slot, expert in enumerate(placed[local.start : local.stop]):
        for i, name in enumerate(("gate", "up")):
            k, source = out.source(f"{module}.{expert}.{name}_proj.weight")
            out.copy(k, source.narrow(0, shard * n, n), w13, out.view(w13).select(0, slot).narrow(0, i * n, n))
        k, source = out.source(f"{module}.{expert}.down_proj.weight")
        out.copy(k, source.narrow(1, shard * n, n), w2, out.view(w2).select(0, slot))


# -- the fleets ----------------------------------------------------------------------------------------------

OWNERSHIPS = ("fsdp", "pipeline", "experts", "pipeline+experts", "any")


@frozen
class Scenario:
    """Everything that decides a plan."""

    sizes: Sizes = field(factory=Sizes)
    topology: InferenceTopology = field(factory=InferenceTopology)
    settings: TransferSettings = field(factory=TransferSettings)
    trainer_ranks: int = 1
    ownership: str = "fsdp"
    shuffled: bool = False
    """The manifest's names are in no order, as in a sorted header or a merged checkpoint."""
    seed: int = 0

    @property
    def entries(self) -> list[SourceTensor]:
        entries = source_entries(self.sizes)
        if self.shuffled:
            random.Random(self.seed).shuffle(entries)
        return entries

    @property
    def manifest(self) -> Manifest:
        return build_manifest(self.entries)

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.topology, self.trainer_ranks, settings=self.settings)

    @property
    def owners(self) -> tuple[Ints, ...]:
        return tuple(self._owners(e.name) for e in self.entries)

    def _owners(self, name: str) -> Ints:
        ranks = range(self.trainer_ranks)
        if self.ownership == "any":
            dice = random.Random(f"{self.seed} {name}")
            return tuple(sorted(dice.sample(ranks, dice.randint(1, len(ranks)))))
        parts = name.split(".")
        if "pipeline" in self.ownership:
            stages = min(len(ranks), 1 + self.seed % 3, self.sizes.layers)
            layer = int(parts[2]) if parts[1] == "layers" else 0 if "embed" in name else self.sizes.layers - 1
            stage = next(s for s in range(stages) if layer in _stage(self.sizes.layers, s, stages))
            ranks = _stage(len(ranks), stage, stages)
        if "experts" in self.ownership and "experts" in parts:
            expert = int(parts[parts.index("experts") + 1])
            return (ranks[expert % len(ranks)],)
        return tuple(ranks)


def traces_of(s: Scenario) -> tuple[list[RankTrace], Ints, list[Loader]]:
    """Distinct traces, the trace of every worker index of one replica, and the loaders that left the
    traces.
    """
    traces: list[RankTrace] = []
    loaders: list[Loader] = []
    trace_of: list[int] = []
    known: dict[Any, int] = {}
    for position in positions(s.topology):
        key = position if s.topology.expert_parallel else evolve(position, dp=0)
        if key not in known:
            known[key] = len(traces)
            loaders.append(load(s.sizes, s.manifest, s.topology, position))
            traces.append(loaders[-1].trace(position))
        trace_of.append(known[key])
    return traces, tuple(trace_of), loaders


def make_draft(s: Scenario) -> Draft:
    """The passes' input."""
    traces, trace_of, _ = traces_of(s)
    return Draft(
        manifest=s.manifest,
        owners=s.owners,
        trainer_ranks=s.trainer_ranks,
        topology=s.topology,
        settings=s.settings,
        programs=tuple(ProgramDraft(t) for t in traces),
        program_of=trace_of,
    )


def finished_draft(s: Scenario) -> Draft:
    """The passes' output."""
    return run_passes(make_draft(s))


def make_plan(s: Scenario | None = None) -> FleetPlan:
    """The verified plan of a scenario."""
    s = s or Scenario()
    traces, trace_of, _ = traces_of(s)
    return assemble(DryRun(s.manifest, s.owners, traces, trace_of, s.fleet, MODEL, COMPILER))


@st.composite
def scenarios(draw: st.DrawFn, chunk_limits: tuple[int, ...] = (0, 0, 48, 100, 256, 1000)) -> Scenario:
    """Any small model on any small fleet."""
    tp = draw(st.sampled_from((1, 2, 4)))
    dp = draw(st.sampled_from((1, 2, 3)))
    pp = draw(st.sampled_from((1, 1, 2, 3)))
    expert_parallel = draw(st.booleans())
    redundant = draw(st.sampled_from((None, 0, 1, 3))) if expert_parallel else None
    layers = draw(st.integers(pp, pp + 2))
    kv_heads = draw(st.sampled_from((1, 2, 4)))
    return Scenario(
        sizes=Sizes(
            layers=layers,
            dense_layers=draw(st.integers(0, layers)),
            hidden=draw(st.sampled_from((1, 3, 8))),
            heads=4,
            kv_heads=kv_heads,
            head_dim=draw(st.integers(1, 3)),
            intermediate=4 * draw(st.integers(1, 2)),
            experts=tp * dp * draw(st.integers(1, 2)) if expert_parallel else draw(st.integers(1, 4)),
            vocab=draw(st.integers(1, 13)),
            vocab_padding=draw(st.sampled_from((1, 4))),
            bias=draw(st.booleans()),
            tied=pp == 1 and draw(st.booleans()),
        ),
        topology=InferenceTopology(
            tp, pp, dp, expert_parallel, draw(st.integers(1, 2)), None if redundant is None else redundant * tp * dp
        ),
        settings=TransferSettings(
            num_rdt_buffers=draw(st.integers(1, 3)),
            buffer_presize_gb=draw(st.sampled_from((0.0, 0.3))),
            stages_in_flight=draw(st.integers(1, 3)),
            staging_device=draw(st.sampled_from(("gpu", "host"))),
            gather_lookahead=draw(st.integers(0, 2)),
            max_chunk_bytes=draw(st.sampled_from(chunk_limits)),
        ),
        trainer_ranks=draw(st.integers(1, 6)),
        ownership=draw(st.sampled_from(OWNERSHIPS)),
        shuffled=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def spans_of(ends: Ints) -> Iterator[range]:
    """The index ranges that a column of ends stands for."""
    start = 0
    for end in ends:
        yield range(start, end)
        start = end
