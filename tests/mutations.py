"""The mutation corpus: a name, what happens to people, what it is applied to, who refuses it and with which code.

`python tools/mutations.py` runs it and prints the detection rate.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from attrs import evolve
from forgery import with_program
from mutation import (
    MUTATIONS,
    Copy,
    Declared,
    as_rank_0,
    attached_to_trainer,
    attached_to_worker,
    compiled,
    compiled_with_loader,
    drop,
    exchanged,
    loaded_by_worker,
    mutation,
    on_workers,
    owned,
    verified,
    verified_sealed,
    verified_with_loaders,
    verified_with_manifest,
    with_rows,
)

from rdtplan.compiler import DryRun
from rdtplan.ir.manifest import Manifest, Piece, SourceTensor
from rdtplan.ir.plan import FleetPlan, Waiver
from rdtplan.ir.regions import Region, canonical
from rdtplan.ir.topology import Position
from rdtplan.ir.traces import Fetches, Fills, RankTrace

__all__ = ["MUTATIONS"]

Entries = list[SourceTensor]
Tensor = torch.Tensor


def enter(name: str, incident: str, subject: str, judge: Any, code: str, change: Any) -> None:
    mutation(name, incident, subject, judge, code)(change)


# -- holes and double writes -------------------------------------------------------------------------------------

enter(
    "dropped copy",
    "A loader's branch for one projection is skipped, and the rows keep what was in memory.",
    "moe",
    verified,
    "RDT311",
    drop("layers.0.self_attn.qkv_proj.weight", "v_proj", [1]),
)


@mutation(
    "double write masks a hole",
    "Up lands on gate: as many elements are written as there are, and a count of them sees nothing.",
    "moe",
    verified,
    "RDT312",
)
def _double_write(found: DryRun) -> DryRun:
    def change(trace: RankTrace) -> RankTrace:
        from mutation import copies_of, with_copies

        rows = copies_of(trace, found.manifest)
        gate = next(c for c in rows if "layers.1.mlp.experts.3.gate_proj" in c.source)
        moved = [evolve(c, dest=gate.dest) if "layers.1.mlp.experts.3.up_proj" in c.source else c for c in rows]
        return with_copies(trace, found.manifest, moved)

    return on_workers(found, change)


def _fills(change: Callable[[RankTrace], Fills]) -> Callable[[DryRun], DryRun]:
    def apply(found: DryRun) -> DryRun:
        def edit(trace: RankTrace) -> RankTrace:
            fills = change(trace)
            return evolve(trace, fills=fills, fill_loaders=trace.fill_loaders[: len(fills)])

        return on_workers(found, edit)

    return apply


enter(
    "dropped padding fill",
    "The rows that pad a vocabulary are not zeroed; their logits win whenever memory holds large numbers.",
    "moe",
    verified,
    "RDT311",
    _fills(lambda t: Fills((), (), (), ())),
)


@mutation(
    "padding fill after the copy",
    "The whole parameter is zeroed after its rows have landed.",
    "moe",
    verified,
    "RDT312",
)
def _late_fill(found: DryRun) -> DryRun:
    def edit(trace: RankTrace) -> RankTrace:
        if not len(trace.fills):
            return trace
        row = trace.fills.parameters[0]
        whole = canonical(trace.parameters.shapes[row], trace.parameters.strides[row], 0)
        fills = evolve(
            trace.fills,
            regions=(len(trace.regions), *trace.fills.regions[1:]),
            before=(0, *trace.fills.before[1:]),
        )
        return evolve(trace, regions=(*trace.regions, whole), fills=fills)

    return on_workers(found, edit)


enter(
    "write past the end",
    "A loader for a checkpoint with more experts writes behind the last one.",
    "moe",
    verified,
    "RDT313",
    with_rows(
        lambda c: (
            evolve(c, dest=evolve(c.dest, offset=c.dest.offset + 64 * 128 * 8))
            if c.source.endswith("layers.0.mlp.experts.7.gate_proj.weight")
            else c
        )
    ),
)
enter(
    "read past the end",
    "A slice computed for more KV heads than the checkpoint has.",
    "moe",
    verified,
    "RDT314",
    with_rows(
        lambda c: (
            evolve(c, taken=evolve(c.taken, offset=c.taken.offset + 32 * 128))
            if c.source.endswith("layers.0.self_attn.k_proj.weight")
            else c
        )
    ),
)
enter(
    "broadcast in a plan",
    "One row of a bias or scale is repeated over all rows (`copy_` broadcasts without a word).",
    "moe, one rank",
    verified,
    "RDT321",
    with_rows(
        lambda c: evolve(c, taken=Region((8, 128), (0, 1), 0)) if c.source.endswith("layers.0.mlp.gate.weight") else c
    ),
)


@mutation(
    "zero-byte plan",
    "Waivers that match everything turn an empty plan into a sound one: every sync succeeds and moves nothing.",
    "moe",
    verified,
    "RDT337",
)
def _zero_bytes(found: DryRun) -> DryRun:
    nothing = Fetches((), (), (), (), (), (), ())
    fleet = evolve(found.fleet, waivers=(Waiver("RDT310", "*"), Waiver("RDT311", "*"), Waiver("RDT320", "*")))
    changed = on_workers(found, lambda t: evolve(t, fetches=nothing, fills=Fills((), (), (), ()), fill_loaders=()))
    return evolve(changed, fleet=fleet)


enter(
    "buffer left stale",
    "A trained buffer keeps its first value, since only parameters were looked for.",
    "buffers",
    verified,
    "RDT320",
    drop("layers.1.mlp.act_fn.beta"),
)

# -- ranks -------------------------------------------------------------------------------------------------------

enter(
    "rank loads shard 0",
    "Rank 1 starts with another rank's index and holds a copy of shard 0.",
    "moe",
    verified,
    "RDT321",
    as_rank_0("layers.1.self_attn.o_proj.weight", 1),
)
enter(
    "rank loads shard 0, hidden by a data-parallel copy",
    "The other engine of the pair takes the shard, so every source is consumed and every parameter written.",
    "moe, data-parallel",
    verified,
    "RDT335",
    as_rank_0("layers.1.self_attn.o_proj.weight", 1),
)


@mutation(
    "ranks exchanged",
    "Two workers get each other's rank after a restart: all shards are there, in the wrong places.",
    "moe",
    verified,
    "RDT335",
)
def _ranks_exchanged(found: DryRun) -> DryRun:
    return with_rows(lambda c: _shifted(c, 0), [1])(with_rows(lambda c: _shifted(c, 1), [0])(found))


def _shifted(c: Copy, to: int) -> Copy:
    """Row shards of down_proj of the experts: columns `to * 32` to `to * 32 + 32` of 64."""
    return evolve(c, taken=evolve(c.taken, offset=32 * to)) if ".down_proj." in c.source else c


@mutation(
    "replicated weight narrowed",
    "A norm that every rank holds whole is sharded on one of them, with a parameter to fit.",
    "moe",
    verified,
    "RDT335",
)
def _narrowed(found: DryRun) -> DryRun:
    name = "model.layers.0.input_layernorm.weight"

    def change(trace: RankTrace) -> RankTrace:
        row = trace.parameters.names.index(name)
        shapes = trace.parameters.shapes
        return evolve(trace, parameters=evolve(trace.parameters, shapes=(*shapes[:row], (64,), *shapes[row + 1 :])))

    half = Region((64,), (1,), 0)
    narrow = with_rows(lambda c: evolve(c, taken=half, dest=half) if c.parameter == name else c, [1])
    return on_workers(narrow(found), change, [1])


enter(
    "gate and up exchanged on one rank",
    "A rank reads an older checkpoint layout than the others.",
    "moe",
    verified,
    "RDT336",
    exchanged("gate_proj", "up_proj", "layers.0.mlp.experts.5", [1]),
)
enter(
    "norms exchanged on one rank",
    "Two weights of one shape and almost one name.",
    "moe",
    verified,
    "RDT336",
    exchanged("input_layernorm", "post_attention_layernorm", "layers.1.", [1]),
)
enter(
    "norms exchanged on one expert rank",
    "The same where the ranks hold different experts and few parameters are alike.",
    "moe, experts spread",
    verified,
    "RDT336",
    exchanged("input_layernorm", "post_attention_layernorm", "layers.1.", [1]),
)


def _transposed(c: Copy) -> Copy:
    """A square shard written column by column."""
    if not c.parameter.endswith("layers.0.mlp.down_proj.weight"):
        return c
    return evolve(c, dest=canonical((256, 256), (1, 256), 0))


enter(
    "square matrix transposed on one rank",
    "No shape differs, so nothing raises.",
    "fp8",
    verified,
    "RDT336",
    with_rows(_transposed, [1]),
)


def _without_operations(trace: RankTrace) -> RankTrace:
    from rdtplan.ir.operations import NO_LEAVES, NO_OPERATIONS

    return evolve(trace, operations=NO_OPERATIONS, leaves=NO_LEAVES, expressions=(), operation_loaders=())


enter(
    "transform dropped on one rank",
    "Mamba's A is -exp(A_log) on one rank and A_log on the other.",
    "mamba",
    verified,
    "RDT336",
    lambda found: on_workers(found, _without_operations, [1]),
)


@mutation(
    "stale replica",
    "One of two engines was given the plan of last week's model.",
    "moe",
    verified_sealed,
    "RDT334",
)
def _stale_replica(plan: FleetPlan) -> FleetPlan:
    program = plan.consumers[2].program
    gate, up = (plan.manifest.names.index(f"model.layers.0.mlp.experts.0.{n}_proj.weight") for n in ("gate", "up"))
    marked = {gate: up, up: gate}
    older = evolve(program, keys=evolve(program.keys, source=tuple(marked.get(k, k) for k in program.keys.source)))
    return evolve(plan, consumers=(*plan.consumers[:2], evolve(plan.consumers[2], program=older), plan.consumers[3]))


# -- what only the loaders know ----------------------------------------------------------------------------------

for _name, _incident, _subject, _change in (
    (
        "gate and up exchanged",
        "The wrong half of a fused gate_up_proj, on every rank: SiLU of the wrong half, and nothing raises.",
        "moe",
        exchanged("gate_proj", "up_proj"),
    ),
    (
        "gate and up of one expert exchanged",
        "One of thousands of copies.",
        "moe, experts spread",
        exchanged("gate_proj", "up_proj", "layers.1.mlp.experts.6."),
    ),
    (
        "experts exchanged",
        "Expert rows under another placement than the router's.",
        "moe, experts spread",
        exchanged("experts.1.", "experts.6.", "layers.0."),
    ),
    (
        "experts reordered",
        "Experts sorted as text: 0, 1, 10, 11, 2.",
        "moe",
        exchanged("experts.1.", "experts.2."),
    ),
    ("K and V exchanged", "The order of a fused QKV differs between frameworks.", "moe", exchanged("k_proj", "v_proj")),
    ("norms of Q and K exchanged", "Two weights of one shape.", "moe", exchanged("q_norm", "k_norm")),
    (
        "norms exchanged",
        "Pre- and post-attention norm by another framework's names.",
        "moe",
        exchanged("input_layernorm", "post_attention_layernorm"),
    ),
    (
        "layers exchanged",
        "A pipeline stage counts its layers from its own first one.",
        "moe",
        exchanged("layers.0.", "layers.1."),
    ),
    (
        "embedding and head exchanged",
        "Two matrices of one shape, where nothing is tied.",
        "moe",
        exchanged("model.embed_tokens", "lm_head"),
    ),
    (
        "square matrix transposed",
        "Conv1D weights are stored the other way round; a square one loads without an error.",
        "fp8",
        with_rows(_transposed),
    ),
    (
        "rotary halves interleaved",
        "Query rows in the order of the other rotary layout.",
        "moe",
        with_rows(
            lambda c: (
                evolve(c, dest=canonical((2, 16, 2, 128), (4096, 128, 2048, 1), 0))
                if c.source.endswith("q_proj.weight")
                else c
            )
        ),
    ),
    (
        "scale read as integers",
        "A scale of another type with as many bytes, reinterpreted and then converted.",
        "fp8",
        with_rows(lambda c: evolve(c, dtype="int32") if c.source.endswith("scale_inv") else c),
    ),
    (
        "scales exchanged",
        "The right weight with the scale of its neighbour.",
        "fp8",
        exchanged("gate_proj.weight_scale", "up_proj.weight_scale"),
    ),
    (
        "transform dropped",
        "A rewrite after loading is not seen (`composed_weight_loader`), and Mamba decays by A_log.",
        "mamba",
        lambda found: on_workers(found, _without_operations),
    ),
    (
        "transform half done",
        "exp without its sign.",
        "mamba",
        lambda found: on_workers(
            found, lambda t: evolve(t, expressions=tuple(evolve(e, nodes=e.nodes[:-1]) for e in t.expressions))
        ),
    ),
    (
        "padding filled with another number",
        "Padding rows that are not zero take part in the softmax.",
        "moe",
        _fills(lambda t: evolve(t.fills, values=(1.0,) * len(t.fills))),
    ),
    (
        "parameter of another type",
        "float16 and bfloat16 have as many bytes.",
        "moe",
        lambda found: on_workers(
            found,
            lambda t: evolve(
                t,
                parameters=evolve(
                    t.parameters,
                    dtypes=tuple(
                        "float16" if n == "model.norm.weight" else d
                        for n, d in zip(t.parameters.names, t.parameters.dtypes, strict=True)
                    ),
                ),
            ),
        ),
    ),
):
    enter(_name, _incident, _subject, verified_with_loaders, "RDT332", _change)


@mutation(
    "name left out on both sides",
    "The manifest was made before the model had the weight; plan and loaders agree, and it is never sent.",
    "buffers",
    verified_with_manifest,
    "RDT333",
)
def _left_out(found: DryRun) -> DryRun:
    m, name = found.manifest, "model.layers.1.mlp.act_fn.beta"
    if name not in m.names:
        return found
    k = m.names.index(name)
    kept = [i for i in range(len(m)) if i != k]
    shorter = Manifest(
        tuple(m.names[i] for i in kept),
        m.dtype_table,
        m.shape_table,
        tuple(m.dtypes[i] for i in kept),
        tuple(m.shapes[i] for i in kept),
    )
    before = drop(name)(found)

    def renumber(trace: RankTrace) -> RankTrace:
        f = trace.fetches
        row = trace.parameters.names.index(name)
        p = trace.parameters
        keep = [i for i in range(len(p)) if i != row]
        columns = {
            c: tuple(getattr(p, c)[i] for i in keep)
            for c in ("names", "modules", "dtypes", "shapes", "strides", "kinds", "aliases")
        }
        return evolve(
            trace,
            parameters=evolve(p, **columns),
            fetches=evolve(
                f,
                sources=tuple(s - (s > k) for s in f.sources),
                parameters=tuple(q - (q > row) for q in f.parameters),
            ),
            untouched=(*trace.untouched, name),
            untouched_reasons=(*trace.untouched_reasons, "no loader writes this buffer; it keeps what the model made"),
        )

    owners = tuple(found.owners[i] for i in kept)
    return evolve(on_workers(before, renumber), manifest=shorter, owners=owners)


# -- order, signals and owners in a finished plan ----------------------------------------------------------------


def _put(column: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    at %= len(column)
    return (*column[:at], value, *column[at + 1 :])


def _program(**changes: Any) -> Callable[[FleetPlan], FleetPlan]:
    return lambda plan: with_program(plan, **changes)


def _routing(field: str, value: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[[FleetPlan], FleetPlan]:
    def apply(plan: FleetPlan) -> FleetPlan:
        c = plan.consumers[0]
        routing = evolve(c.routing, **{field: value(getattr(c.routing, field))})
        return evolve(plan, consumers=(evolve(c, routing=routing), *plan.consumers[1:]))

    return apply


def _producer(field: str, value: Callable[[Any], Any]) -> Callable[[FleetPlan], FleetPlan]:
    def apply(plan: FleetPlan) -> FleetPlan:
        p = plan.producers[0]
        return evolve(plan, producers=(evolve(p, **{field: value(getattr(p, field))}), *plan.producers[1:]))

    return apply


for _name, _incident, _edit in (
    (
        "group freed early",
        "The signal goes out one chunk too soon, and the trainer gathers the next layer over what is still read.",
        _program(free_after=lambda f: _put(f, -1, f[-1] - 1)),
    ),
    (
        "one signal too few awaited",
        "A producer frees a group when all consumers but one are done.",
        _producer("signals", lambda s: _put(s, 0, s[0] - 1)),
    ),
    (
        "module completed early",
        "A fused module is quantized before its last part has landed.",
        _program(lifetimes=lambda t: evolve(t, last=_put(t.last, 0, t.last[0] + 1))),
    ),
    (
        "serve slot used twice",
        "Two chunks in flight have one sequence number, and the second overwrites the first.",
        _routing("seq", lambda s: _put(s, -1, s[-2])),
    ),
    (
        "packed slices overlap",
        "The layout of the two sides differs by one slice.",
        _program(keys=lambda t: evolve(t, offset=_put(t.offset, 3, t.offset[2]))),
    ),
    (
        "another chunk served",
        "The producer counts chunks as an older plan did.",
        _producer("servings", lambda s: _put(s, 0, evolve(s[0], chunks=s[0].chunks[::-1]))),
    ),
    (
        "chunks out of order",
        "A worker asks for the last group first; the trainer never gets there.",
        _program(chunks=lambda t: evolve(t, group=t.group[::-1])),
    ),
    (
        "key that goes nowhere",
        "A slice is pulled, counted as consumed, and dropped.",
        _program(scatters=lambda t: evolve(t, key=_put(t.key, 1, t.key[0]))),
    ),
    (
        "sizes of a copy differ",
        "torch broadcasts where it can.",
        _program(scatters=lambda t: evolve(t, region=_put(t.region, 0, t.region[-1]))),
    ),
):
    enter(_name, _incident, "moe", verified_sealed, "RDT330", _edit)


@mutation(
    "wrong owner",
    "A chunk is asked of a rank that does not hold its names and serves what lies there.",
    "moe, two stages",
    verified_sealed,
    "RDT330",
)
def _wrong_owner(plan: FleetPlan) -> FleetPlan:
    return _routing("producer", lambda p: tuple(1 - rank for rank in p))(plan)


enter(
    "name without owner",
    "A new module of the trainer is in no rule.",
    "moe",
    owned,
    "RDT301",
    lambda found: evolve(found, owners=_put(found.owners, 5, ())),
)
enter(
    "owner that does not exist",
    "The layout was written for a larger trainer.",
    "moe",
    owned,
    "RDT302",
    lambda found: evolve(found, owners=_put(found.owners, 5, (7,))),
)
enter(
    "module of two streams",
    "Q from one pipeline stage, K and V from another: the module is completed by a race.",
    "moe",
    owned,
    "RDT303",
    lambda found: evolve(
        found,
        owners=tuple((1,) if "layers.1." in n or n.startswith("model.norm") else (0,) for n in found.manifest.names),
        traces=exchanged("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj")(found).traces,
    ),
)


def _pieces(*pieces: Piece) -> Callable[[Entries], Entries]:
    return lambda entries: [evolve(e, pieces=pieces) if e.name == "lm_head.weight" else e for e in entries]


enter(
    "shards with a hole",
    "A row shard is computed with floor where the trainer used ceil.",
    "moe",
    compiled,
    "RDT107",
    _pieces(Piece((0, 0), (129, 128), (0,)), Piece((130, 0), (129, 128), (1,))),
)
enter(
    "shards that overlap",
    "Two ranks hold the same rows, trained differently.",
    "moe",
    compiled,
    "RDT107",
    _pieces(Piece((0, 0), (130, 128), (0,)), Piece((129, 0), (130, 128), (1,))),
)

# -- manifests ---------------------------------------------------------------------------------------------------

enter(
    "dropped scale",
    "Weights are quantized and their scales are not sent; the old ones stay.",
    "fp8",
    compiled,
    "RDT311",
    lambda entries: [e for e in entries if not e.name.endswith("layers.1.mlp.up_proj.weight_scale_inv")],
)
enter(
    "dropped scales of a whole module",
    "The same, with no part of the parameter left.",
    "fp8",
    compiled,
    "RDT310",
    lambda entries: [e for e in entries if not e.name.endswith("layers.1.mlp.down_proj.weight_scale_inv")],
)
enter(
    "duplicated name",
    "Two shards of a checkpoint hold a weight, one of them an older one.",
    "moe",
    compiled,
    "RDT106",
    lambda entries: [*entries, entries[7]],
)
enter(
    "missing expert",
    "One file of the checkpoint was not uploaded.",
    "moe",
    compiled,
    "RDT311",
    lambda entries: [e for e in entries if ".layers.0.mlp.experts.4." not in e.name],
)
enter(
    "source name nobody consumes",
    "vLLM skips names it does not know under some prefixes, and a trained weight goes nowhere.",
    "moe",
    compiled,
    "RDT320",
    lambda entries: [*entries, SourceTensor("model.layers.0.self_attn.rotary_emb.inv_freq", "float32", (16,))],
)
enter(
    "stale draft model",
    "The trainer leaves the MTP layer out, and the workers draft with it: drafts are of the first checkpoint for ever.",
    "draft",
    compiled,
    "RDT207",
    lambda entries: [e for e in entries if "model.layers.2." not in e.name],
)
enter(
    "tied head without its side",
    "The trainer drops the embedding as a duplicate of the head.",
    "tied, two stages",
    compiled,
    "RDT310",
    lambda entries: [e for e in entries if "embed_tokens" not in e.name],
)
enter(
    "tied head updated on one side only",
    "The last stage has a copy of the embedding of its own, and only the first stage gets the new one.",
    "tied, two stages",
    verified,
    "RDT311",
    drop("embed_tokens.weight", "", [1]),
)
enter(
    "shard 0 of a tied head",
    "The copy on the last stage is sharded by another group's rank.",
    "tied, two by two",
    verified,
    "RDT335",
    with_rows(lambda c: evolve(c, taken=evolve(c.taken, offset=0)) if "embed_tokens" in c.source else c, [3]),
)


def _shaped(name: str, shape: tuple[int, ...]) -> Callable[[Entries], Entries]:
    return lambda entries: [evolve(e, shape=shape) if e.name.endswith(name) else e for e in entries]


enter(
    "checkpoint of another size",
    "The config of one model and the weights of another.",
    "moe",
    compiled,
    "RDT207",
    _shaped("layers.0.input_layernorm.weight", (64,)),
)
enter(
    "narrower expert",
    "vLLM's expert loader takes a tensor that is too narrow, and leaves the rest of the parameter as it was.",
    "moe",
    compiled,
    "RDT311",
    _shaped("layers.0.mlp.experts.0.up_proj.weight", (64, 64)),
)

# -- loaders -----------------------------------------------------------------------------------------------------


def _vocabulary_loader(load: Callable[[Any, Any, Tensor], None]) -> Callable[[], Any]:
    """vLLM with another `VocabParallelEmbedding.weight_loader`."""

    def patch() -> Any:
        module = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
        return mock.patch.object(module.VocabParallelEmbedding, "weight_loader", load)

    return patch


def _default_loader(load: Callable[[Any, Tensor], None]) -> Callable[[], Any]:
    """vLLM with another default loader, of norms and routers."""

    def patch() -> Any:
        return mock.patch.object(
            importlib.import_module("vllm.model_executor.models.utils"), "default_weight_loader", load
        )

    return patch


def _shard(self: Any, loaded: Tensor) -> Tensor:
    start = self.shard_indices.org_vocab_start_index
    return loaded.narrow(0, start, self.shard_indices.org_vocab_end_index - start)


def _load_and_pad(self: Any, param: Any, shard: Tensor) -> None:
    param[: shard.shape[0]].data.copy_(shard)
    param[shard.shape[0] :].data.fill_(0)


def _no_fill(self: Any, param: Any, loaded: Tensor) -> None:
    shard = _shard(self, loaded)
    param[: shard.shape[0]].data.copy_(shard)


def _on_rank_0(self: Any, param: Any, loaded: Tensor) -> None:
    if self.tp_rank == 0 if hasattr(self, "tp_rank") else self.shard_indices.org_vocab_start_index == 0:
        _load_and_pad(self, param, _shard(self, loaded))


def _always_shard_0(self: Any, param: Any, loaded: Tensor) -> None:
    _load_and_pad(
        self, param, loaded.narrow(0, 0, param.shape[0] if loaded.shape[0] >= param.shape[0] else loaded.shape[0])
    )


def _twice(self: Any, param: Any, loaded: Tensor) -> None:
    shard = _shard(self, loaded)
    _load_and_pad(self, param, shard)
    param[: shard.shape[0]].data.copy_(shard)


def _broadcast(self: Any, param: Any, loaded: Tensor) -> None:
    param.data.copy_(loaded[:1])


def _by_value(self: Any, param: Any, loaded: Tensor) -> None:
    shard = _shard(self, loaded)
    _load_and_pad(self, param, shard * 2 if shard.abs().max() < 1 else shard)


def _through_numpy(self: Any, param: Any, loaded: Tensor) -> None:
    _load_and_pad(self, param, torch.from_numpy(_shard(self, loaded).float().numpy()))


def _swallowed(self: Any, param: Any, loaded: Tensor) -> None:
    with contextlib.suppress(Exception):
        if loaded[0, 0].item() == 0:
            return
    _load_and_pad(self, param, _shard(self, loaded))


def _by_mask(self: Any, param: Any, loaded: Tensor) -> None:
    rows = torch.ones(param.shape[0], dtype=torch.bool)
    param.data[rows] = loaded[: param.shape[0]]


def _at_random(self: Any, param: Any, loaded: Tensor) -> None:
    param.data.normal_()


def _other_bits(self: Any, param: Any, loaded: Tensor) -> None:
    shard = _shard(self, loaded)
    param.data.view(torch.int16)[: shard.shape[0]].copy_(shard.view(torch.int16))


def _behind_the_recorder(self: Any, param: Any, loaded: Tensor) -> None:
    shard = _shard(self, loaded)
    with torch._C.DisableTorchFunction():
        _load_and_pad(self, param, shard)


def _rewritten_behind(self: Any, param: Any, loaded: Tensor) -> None:
    _load_and_pad(self, param, _shard(self, loaded))
    _negate(param.data)


@torch.jit.script
def _negate(x: Tensor) -> Tensor:
    return x.neg_()


def _kept_aside(self: Any, param: Any, loaded: Tensor) -> None:
    self.cached = _shard(self, loaded)
    _load_and_pad(self, param, self.cached)


def _new_memory(self: Any, param: Any, loaded: Tensor) -> None:
    param.data = _shard(self, loaded)


def _source_changed(self: Any, param: Any, loaded: Tensor) -> None:
    loaded.cumsum_(0)
    _load_and_pad(self, param, _shard(self, loaded))


def _scratch(self: Any, param: Any, loaded: Tensor) -> None:
    param.data.copy_(torch.empty(param.shape, dtype=param.dtype))


def _padded_by_default(self: Any, param: Any, loaded: Tensor) -> None:
    shard = _shard(self, loaded)
    param.data.index_copy_(0, torch.arange(shard.shape[0]), shard)


def _skipped(param: Any, loaded: Tensor) -> None:
    if loaded.dim() > 1:
        param.data.copy_(loaded)


for _name, _incident, _subject, _code, _loader in (
    ("loader without padding fill", "Padding rows keep what was in memory.", "moe", "RDT311", _no_fill),
    ("loader that loads on rank 0", "A guard meant for logging also guards the copy.", "moe", "RDT310", _on_rank_0),
    ("loader that copies shard 0", "The rank is taken from the wrong group.", "moe", "RDT321", _always_shard_0),
    ("loader that writes twice", "Which of two writes lasts depends on timing.", "moe, one rank", "RDT312", _twice),
    ("loader that broadcasts", "`copy_` of one row fills all of them.", "moe, one rank", "RDT203", _broadcast),
    (
        "loader that looks at data",
        "Scales are folded in when the values are small.",
        "moe, one rank",
        "RDT201",
        _by_value,
    ),
    ("loader through NumPy", "What happens there is not seen by torch.", "moe, one rank", "RDT201", _through_numpy),
    (
        "loader that swallows errors",
        "`try` around a look at the data, and the refusal is lost.",
        "moe, one rank",
        "RDT201",
        _swallowed,
    ),
    ("loader with a mask", "Rows are chosen by a tensor.", "moe, one rank", "RDT202", _by_mask),
    (
        "loader by index",
        "Rows are placed by a tensor of indices.",
        "moe, one rank",
        "RDT202",
        _padded_by_default,
    ),
    ("loader that initializes", "A missing weight is drawn at random.", "moe, one rank", "RDT202", _at_random),
    ("loader of unset memory", "A buffer from torch.empty is copied.", "moe, one rank", "RDT202", _scratch),
    ("loader of other bits", "Packed formats are copied under another type.", "moe, one rank", "RDT206", _other_bits),
    (
        "loader behind the recorder",
        "A copy that no Python call shows: C++ extensions load so.",
        "moe, one rank",
        "RDT230",
        _behind_the_recorder,
    ),
    (
        "transform behind the recorder",
        "A scripted or compiled function rewrites the parameter after the load, and the plan lacks the rewrite.",
        "moe, one rank",
        "RDT230",
        _rewritten_behind,
    ),
    (
        "loader that keeps the source",
        "A copy in a plain attribute stays stale.",
        "moe, one rank",
        "RDT208",
        _kept_aside,
    ),
    (
        "loader that replaces memory",
        "CUDA graphs go on reading the old memory.",
        "moe, one rank",
        "RDT205",
        _new_memory,
    ),
    (
        "loader that changes the source",
        "The next consumer reads what is left.",
        "moe, one rank",
        "RDT204",
        _source_changed,
    ),
):
    enter(_name, _incident, _subject, compiled_with_loader, _code, _vocabulary_loader(_loader))

enter(
    "loader that skips silently",
    "One-dimensional weights are taken for biases the model does not have.",
    "moe, one rank",
    compiled_with_loader,
    "RDT310",
    _default_loader(_skipped),
)

# -- live workers ------------------------------------------------------------------------------------------------


def _replace(path: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        module, _, name = path.rpartition(".")
        owner = model.get_submodule(module)
        setattr(owner, name, torch.nn.Parameter(make(getattr(owner, name).data), requires_grad=False))

    return change


enter(
    "non-contiguous layout",
    "A kernel keeps its weight transposed; the same shape with other strides takes the bytes elsewhere.",
    "moe",
    attached_to_worker,
    "RDT501",
    _replace("model.layers.0.self_attn.qkv_proj.weight", lambda t: torch.empty_like(t.t().contiguous()).t()),
)
enter(
    "worker in float16",
    "--dtype differs between the compile and the server.",
    "moe",
    attached_to_worker,
    "RDT501",
    _replace("model.norm.weight", lambda t: t.to(torch.float16)),
)
enter(
    "worker with another shard size",
    "The server runs with another tensor-parallel size.",
    "moe",
    attached_to_worker,
    "RDT501",
    _replace("model.layers.0.self_attn.o_proj.weight", lambda t: t[:, :32].contiguous()),
)


@mutation(
    "worker that ties its head",
    "The server was given a config with tied embeddings: one of the two weights wins.",
    "moe",
    attached_to_worker,
    "RDT501",
)
def _ties(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


enter(
    "worker at another rank",
    "Two servers were started with each other's rank.",
    "moe",
    loaded_by_worker,
    "RDT502",
    lambda plan: (plan, 1, Position(0, 0, 0)),
)

# -- live trainers -----------------------------------------------------------------------------------------------


def _declared(name: str, change: Callable[[Declared], Declared | None]) -> Callable[[list[Declared]], list[Declared]]:
    return lambda rows: [x for x in (change(r) if r.name.endswith(name) else r for r in rows) if x is not None]


for _name, _incident, _subject, _edit_rows in (
    (
        "dtype of a scale changed",
        "The trainer keeps scales in bfloat16, and the worker reads them as float32.",
        "fp8",
        _declared("layers.0.mlp.up_proj.weight_scale_inv", lambda r: evolve(r, dtype="bfloat16")),
    ),
    (
        "trainer in float32",
        "Master weights instead of the served ones.",
        "moe",
        _declared("", lambda r: evolve(r, dtype="float32")),
    ),
    (
        "trainer's weight transposed",
        "[in, out] where the checkpoint has [out, in].",
        "moe",
        _declared("mlp.gate.weight", lambda r: evolve(r, shape=r.shape[::-1])),
    ),
    (
        "trainer lacks a name",
        "A frozen module is left out of the state dict.",
        "moe",
        _declared("layers.1.self_attn.q_norm.weight", lambda r: None),
    ),
    (
        "trainer has a name more",
        "An adapter was added and is never sent.",
        "moe",
        lambda rows: [*rows, Declared("model.layers.0.mlp.adapter.weight", "bfloat16", (8, 8))],
    ),
    (
        "trainer rank does not hold what it serves",
        "Expert placement changed between compile and launch.",
        "moe",
        _declared("experts.3.up_proj.weight", lambda r: evolve(r, owners=(1,))),
    ),
):
    enter(_name, _incident, _subject, attached_to_trainer, "RDT503", _edit_rows)
