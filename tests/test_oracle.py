"""The executed plan gives byte for byte what vLLM's own loaders give: every architecture, layout and rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from attrs import evolve
from oracle import WAYS, Rank, Sources, Way, compare, corpus_manifest, planned_load, stock_load

from rdtexec.plans import chunk_scatters
from rdtplan.compiler import Fleet, compile_plan
from rdtplan.inputs.owners import OwnerRule
from rdtplan.ir.manifest import SourceTensor, build_manifest
from rdtplan.ir.plan import FleetPlan, Program
from rdtplan.ir.topology import InferenceTopology, Position, TransferSettings, positions
from rdtplan.ir.traces import Fills
from rdtplan.trace import dry_run
from rdtplan.trace.recorder import Recorder

DENSE = (
    "LlamaForCausalLM",
    "LlamaForCausalLM@odd",
    "LlamaForCausalLM@tied",
    "LlamaForCausalLM@both",
    "LlamaForCausalLM@headbias",
    "Qwen2ForCausalLM",
    "Qwen2ForCausalLM@odd",
    "Qwen2ForCausalLM@both",
    "Qwen3ForCausalLM",
    "Qwen3ForCausalLM@both",
)
MOE = (
    "Qwen3MoeForCausalLM",
    "Qwen3MoeForCausalLM@odd",
    "Qwen3MoeForCausalLM@both",
    "MixtralForCausalLM",
    "MixtralForCausalLM@odd",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM@noq",
    "Glm4MoeForCausalLM",
    "Glm4MoeForCausalLM@odd",
)
LAYOUTS = {
    "tp1": InferenceTopology(),
    "tp2": InferenceTopology(tensor_parallel=2),
    "tp2-ep": InferenceTopology(tensor_parallel=2, expert_parallel=True),
    "dp2": InferenceTopology(data_parallel=2),
    "dp2-ep": InferenceTopology(data_parallel=2, expert_parallel=True),
    "pp2": InferenceTopology(pipeline_parallel=2),
    "pp2-tp2-ep": InferenceTopology(tensor_parallel=2, pipeline_parallel=2, expert_parallel=True),
    "tp2-replicas2": InferenceTopology(tensor_parallel=2, replicas=2),
    "dp2-ep-replicas2": InferenceTopology(data_parallel=2, expert_parallel=True, replicas=2),
}
CASES = [
    *((name, layout) for name in DENSE for layout in ("tp1", "tp2")),
    *((name, layout) for name in MOE for layout in ("tp1", "tp2", "tp2-ep")),
    *(("Qwen3MoeForCausalLM", layout) for layout in ("dp2", "dp2-ep", "pp2", "pp2-tp2-ep")),
    ("Qwen3MoeForCausalLM", "dp2-ep-replicas2"),
    *(("DeepseekV2ForCausalLM", layout) for layout in ("dp2-ep", "pp2")),
    *(("Qwen3ForCausalLM", layout) for layout in ("dp2", "pp2", "tp2-replicas2")),
    ("LlamaForCausalLM@tied", "pp2"),
]
SMALL_CHUNK = 3000
"""Bytes: cuts the vocabulary matrices and most others, at no multiple of a row."""


class Bench:
    """Corpus models by name, with what is slow to make made once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sources: dict[str, Sources] = {}

    def config_dir(self, name: str) -> Path:
        return oracle.corpus_config(name, self._directory)

    def sources(self, name: str) -> Sources:
        if name not in self._sources:
            self._sources[name] = oracle.random_sources(corpus_manifest(name))
        return self._sources[name]

    def compile(self, name: str, topology: InferenceTopology, **fleet: Any) -> FleetPlan:
        described = Fleet(topology=topology, **fleet)
        return compile_plan(self.config_dir(name), corpus_manifest(name), described, jobs=1)

    def rank(self, name: str, topology: InferenceTopology, position: Position) -> Rank:
        return Rank(self.config_dir(name), topology, position)

    def differences(self, name: str, plan: FleetPlan) -> dict[tuple[str, Way], dict[str, int]]:
        """(worker, way) -> what `compare` reports, for every worker where it reports anything."""
        found: dict[tuple[str, Way], dict[str, int]] = {}
        stock: dict[Position, dict[str, torch.Tensor]] = {}
        for consumer in plan.consumers:
            rank = self.rank(name, plan.topology, consumer.position)
            if rank.position not in stock:
                stock[rank.position] = oracle.snapshot(stock_load(rank, self.sources(name)))
            for way in WAYS:
                planned = planned_load(rank, consumer.program, plan.manifest, self.sources(name), way)
                if difference := compare(stock[rank.position], planned):
                    found[f"worker {consumer.consumer_id}, {consumer.position}", way] = difference
        return found


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    yield Bench(tmp_path_factory.mktemp("corpus"))
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{n}-{layout}" for n, layout in CASES])
def test_plan_equals_stock_load(bench: Bench, name: str, layout: str) -> None:
    """Rule: on every worker the executed plan leaves exactly the bytes that stock `load_weights` leaves."""
    plan = bench.compile(name, LAYOUTS[layout])
    assert len(plan.consumers) == LAYOUTS[layout].workers
    assert bench.differences(name, plan) == {}


@pytest.mark.parametrize(
    ("name", "layout"),
    [("LlamaForCausalLM@odd", "tp2"), ("Qwen3MoeForCausalLM@odd", "tp2-ep"), ("Glm4MoeForCausalLM", "tp1")],
)
def test_small_chunks_equal_stock_load(bench: Bench, name: str, layout: str) -> None:
    """Rule: cutting slices to fit `max_chunk_bytes` changes no byte, and no chunk exceeds it."""
    whole = bench.compile(name, LAYOUTS[layout])
    cut = bench.compile(name, LAYOUTS[layout], settings=TransferSettings(max_chunk_bytes=SMALL_CHUNK))
    for consumer, uncut in zip(cut.consumers, whole.consumers, strict=True):
        assert max(consumer.program.chunks.nbytes) <= SMALL_CHUNK
        assert len(consumer.program.keys) > 2 * len(uncut.program.keys)
    assert bench.differences(name, cut) == {}


def test_split_ownership_equals_stock_load(bench: Bench) -> None:
    """Rule: who owns what on the trainer's side decides chunks and their order, never a byte."""
    experts = re.compile(r".*\.experts\.[0-3]\..*")
    rules = (OwnerRule((experts,), None, (0,)), OwnerRule((re.compile(".*"),), None, (1, 2)))
    plan = bench.compile("Qwen3MoeForCausalLM", LAYOUTS["tp2"], trainer_ranks=3, owner_rules=rules)
    assert set(plan.consumers[0].program.chunks.owner_class) == {0, 1}
    assert bench.differences("Qwen3MoeForCausalLM", plan) == {}


def test_replicas_share_their_programs(bench: Bench) -> None:
    """Rule: worker w of every replica executes the same program, as do copies of a dense model."""
    replicas = bench.compile("Qwen3ForCausalLM", LAYOUTS["tp2-replicas2"]).consumers
    assert [c.position for c in replicas] == 2 * list(positions(LAYOUTS["tp2-replicas2"]))
    assert replicas[0].program is replicas[2].program and replicas[1].program is replicas[3].program
    assert replicas[0].program != replicas[1].program
    copies = bench.compile("Qwen3ForCausalLM", LAYOUTS["dp2"]).consumers
    assert copies[0].program is copies[1].program


def test_a_tied_head_that_is_sent_as_well_is_noted(bench: Bench) -> None:
    """Rule: a tied head is one storage with the embedding, written once; its own name goes nowhere, with a note."""
    plan = bench.compile("LlamaForCausalLM@both", LAYOUTS["tp2"])
    assert any("'lm_head.weight' goes nowhere" in note for note in plan.notes)
    head = plan.manifest.names.index("lm_head.weight")
    for consumer in plan.consumers:
        assert head not in consumer.program.keys.source
        assert ("lm_head.weight",) in consumer.program.parameters.aliases


def test_padding_is_filled_with_zeros(bench: Bench) -> None:
    """Rule: rows that only padding needs are written by the plan as constants, since no source holds them."""
    plan = bench.compile("Qwen2ForCausalLM@odd", LAYOUTS["tp2"])
    first, last = (c.program for c in plan.consumers)
    assert len(first.fills) == 0, "259 rows in two halves of 160: only the second half is padded"
    filled = [last.parameters.names[k] for k in last.fills.parameters]
    assert sorted(filled) == ["lm_head.weight", "model.embed_tokens.weight"]
    assert set(last.fills.values) == {0.0}
    rank = bench.rank("Qwen2ForCausalLM@odd", plan.topology, Position(0, 0, 1))
    model = planned_load(rank, last, plan.manifest, bench.sources("Qwen2ForCausalLM@odd"), "packed")
    assert not oracle.raw_bytes(model.model.embed_tokens.weight[259 - 160 :]).any()


# -- the oracle can fail -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def failing(bench: Bench) -> Callable[..., dict[str, int]]:
    """What the oracle reports on the last rank of a padded model with a program or sources tampered with."""
    name = "Qwen3MoeForCausalLM@odd"
    plan = bench.compile(name, LAYOUTS["tp2"])
    rank = bench.rank(name, plan.topology, Position(0, 0, 1))
    stock = oracle.snapshot(stock_load(rank, bench.sources(name)))

    def report(
        way: Way,
        program: Callable[[Program], Program] = lambda p: p,
        sources: Callable[[Sources], Sources] = lambda s: s,
    ) -> dict[str, int]:
        tampered = program(plan.consumers[1].program)
        return compare(stock, planned_load(rank, tampered, plan.manifest, sources(bench.sources(name)), way))

    return report


@pytest.mark.parametrize("way", WAYS)
def test_oracle_passes_an_honest_plan(failing: Callable[..., dict[str, int]], way: Way) -> None:
    """Rule: the tampering tests below start from a plan that the oracle accepts."""
    assert failing(way) == {}


@pytest.mark.parametrize("way", WAYS)
def test_oracle_sees_one_flipped_bit(failing: Callable[..., dict[str, int]], way: Way) -> None:
    """Rule: one wrong bit in one source is reported, as one byte of the one parameter it lands in."""

    def flip(sources: Sources) -> Sources:
        name = "model.layers.1.mlp.experts.5.down_proj.weight"
        raw = oracle.raw_bytes(sources[name]).clone()
        raw[-1] ^= 1  # the last column: of rank 1
        return {**sources, name: raw.view(sources[name].dtype).view(sources[name].shape)}

    assert failing(way, sources=flip) == {"model.layers.1.mlp.experts.routed_experts.w2_weight": 1}


@pytest.mark.parametrize("way", WAYS)
def test_oracle_sees_a_dropped_scatter(failing: Callable[..., dict[str, int]], way: Way) -> None:
    """Rule: one copy that is not made leaves the poison, and the parameter is reported."""
    dropped: list[str] = []

    def drop(program: Program) -> Program:
        chunk = len(program.chunks) // 2
        at = chunk_scatters(program, chunk)[-1]
        dropped.append(program.parameters.names[program.scatters.parameter[at]])
        columns = {
            a: (*getattr(program.scatters, a)[:at], *getattr(program.scatters, a)[at + 1 :])
            for a in ("key", "parameter", "region")
        }
        ends = tuple(end - (c >= chunk) for c, end in enumerate(program.chunks.scatter_end))
        return evolve(
            program,
            scatters=evolve(program.scatters, **columns),
            chunks=evolve(program.chunks, scatter_end=ends),
        )

    assert list(failing(way, program=drop)) == dropped


@pytest.mark.parametrize("way", WAYS)
def test_oracle_sees_two_swapped_slices(failing: Callable[..., dict[str, int]], way: Way) -> None:
    """Rule: right bytes in the wrong place of the right parameter are reported."""

    def swap(program: Program) -> Program:
        scatters = program.scatters
        k = program.parameters.names.index("model.layers.0.self_attn.qkv_proj.weight")
        a, _, b = (s for s, parameter in enumerate(scatters.parameter) if parameter == k)  # of k, q and v
        regions = list(scatters.region)
        regions[a], regions[b] = regions[b], regions[a]
        return evolve(program, scatters=evolve(scatters, region=tuple(regions)))

    assert list(failing(way, program=swap)) == ["model.layers.0.self_attn.qkv_proj.weight"]


@pytest.mark.parametrize("way", WAYS)
def test_oracle_sees_missing_fills(failing: Callable[..., dict[str, int]], way: Way) -> None:
    """Rule: padding rows that are not filled keep the poison, and every byte of them is reported."""

    def unfilled(program: Program) -> Program:
        return evolve(program, fills=Fills((), (), (), ()))

    padding = (2 * 160 - 259) * 128 * 2  # rows * columns * bytes
    assert failing(way, program=unfilled) == {
        "model.embed_tokens.weight": padding,
        "lm_head.weight": padding,
    }


# -- provenance ----------------------------------------------------------------------------------------------


class ReplayingRecorder(Recorder):
    """Replays the op chain of every fetch on a tensor that counts its own elements."""

    replayed = 0

    def _fetch(self, dest: torch.Tensor, src: torch.Tensor, parameter: int, origin: Any) -> None:
        super()._fetch(dest, src, parameter, origin)
        source, chain = origin
        steps = []
        while chain:
            chain, *step = chain
            steps.append(step)
        root = torch.arange(torch.Size(self.manifest.shape(source)).numel())
        view = root.view(self.manifest.shape(source))
        for func, args, kwargs, index in reversed(steps):
            view = func(view, *args, **(kwargs or {}))
            view = view if index is None else view[index]
        region = list(self.regions)[self.fetches[-1][2]]
        listed = root.as_strided(region.shape, region.stride, region.offset)
        assert torch.equal(view.reshape(-1), listed.reshape(-1)), f"{self.manifest.names[source]}: {steps}"
        ReplayingRecorder.replayed += 1


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("Qwen2ForCausalLM@odd", "tp2"),
        ("Qwen3MoeForCausalLM", "tp2"),
        ("Qwen3MoeForCausalLM", "tp2-ep"),
        ("DeepseekV2ForCausalLM", "tp2"),
        ("Glm4MoeForCausalLM", "dp2-ep"),
    ],
)
def test_replayed_chains_give_the_recorded_regions(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, layout: str
) -> None:
    """Rule: the op chain kept as provenance, replayed, selects the elements of the recorded region."""
    monkeypatch.setattr(dry_run, "Recorder", ReplayingRecorder)
    monkeypatch.setattr(ReplayingRecorder, "replayed", 0)
    manifest = build_manifest(corpus_manifest(name))
    fetches = 0
    for position in positions(LAYOUTS[layout]):
        with bench.rank(name, LAYOUTS[layout], position).model(meta=True) as model:
            fetches += len(dry_run.trace_model(model, manifest, position).fetches)
    assert ReplayingRecorder.replayed == fetches > 0


# -- a live model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "DeepseekV2ForCausalLM"])
def test_tracing_leaves_a_live_model_alone(bench: Bench, name: str) -> None:
    """Rule: the dry run changes nothing of a model with real memory, and records what it records on meta."""
    manifest = build_manifest(corpus_manifest(name))
    rank = bench.rank(name, LAYOUTS["tp2"], Position(0, 0, 1))
    with rank.model(meta=True) as model:
        on_meta = dry_run.trace_model(model, manifest, rank.position)
    with rank.model() as model:
        oracle.poison(model, oracle.STOCK_POISON)
        before = oracle.snapshot(model)
        live = dry_run.trace_model(model, manifest, rank.position)
        assert compare(before, model) == {}
    assert live == on_meta


def renamed(entries: list[SourceTensor]) -> list[SourceTensor]:
    """The last bias gets a name that no model has."""
    last = max(k for k, e in enumerate(entries) if e.name.endswith(".bias"))
    return [evolve(e, name=f"{e.name}.nobody") if k == last else e for k, e in enumerate(entries)]


def reshaped(entries: list[SourceTensor]) -> list[SourceTensor]:
    """The last norm gets one element too few."""
    last = max(k for k, e in enumerate(entries) if e.name.endswith("layernorm.weight"))
    return [evolve(e, shape=(e.shape[0] - 1,)) if k == last else e for k, e in enumerate(entries)]


@pytest.mark.parametrize("spoil", [renamed, reshaped])
def test_refused_trace_leaves_a_live_model_alone(
    bench: Bench, spoil: Callable[[list[SourceTensor]], list[SourceTensor]]
) -> None:
    """Rule: a dry run that fails half-way has changed nothing of the live model, buffers and biases too."""
    manifest = build_manifest(spoil(corpus_manifest("Qwen2ForCausalLM")))
    rank = bench.rank("Qwen2ForCausalLM", LAYOUTS["tp1"], Position(0, 0, 0))
    with rank.model() as model:
        oracle.poison(model, oracle.STOCK_POISON)
        before = oracle.snapshot(model)
        assert any(name.endswith(".bias") for name in before)
        assert any(name in before for name, _ in model.named_buffers())
        with pytest.raises(dry_run.TraceError):
            dry_run.trace_model(model, manifest, rank.position)
        assert compare(before, model) == {}
        assert not any(tensor.is_meta for tensor in oracle.held_tensors(model).values())


def test_simulated_ranks_share_no_caches(bench: Bench) -> None:
    """Rule: what vLLM remembers of one rank's model (layers of other stages, say) dies with the rank.

    It remembers by `id(model)`: the next rank's model may get the same id, and would look for its layers
    where the last one had them.
    """
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
    from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names

    name, topology = "DeepseekV2ForCausalLM", LAYOUTS["pp2"]
    manifest = build_manifest(corpus_manifest(name))
    for position in positions(topology):
        rank = bench.rank(name, topology, position)
        with rank.model(meta=True) as model:
            assert not _model_to_pp_missing_layer_names and len(_ROPE_DICT) == 1
            dry_run.trace_model(model, manifest, position)
            assert _model_to_pp_missing_layer_names
    assert not _model_to_pp_missing_layer_names and not _ROPE_DICT
