"""The oracle of correctness: stock `load_weights` with real random bytes, against the executed plan.

Two real models of the same simulated rank are built on CPU and their parameters poisoned, each with another
byte. One is loaded by vLLM, the other by the plan. Every bit pattern is a weight here, NaNs and infinities
included, and everything is compared as bytes: an element that is not written, wrongly cast or moved by one
shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import field, frozen

from rdtexec.destination import Destination
from rdtexec.plans import chunk_keys
from rdtplan.compiler import DryRun, Fleet, assemble
from rdtplan.inputs.manifests import from_json
from rdtplan.ir.manifest import Manifest, SourceTensor, build_manifest
from rdtplan.ir.plan import Compiler, FleetPlan, ModelIdentity, Program
from rdtplan.ir.topology import InferenceTopology, Position
from rdtplan.trace.draft import Draft, draft_of
from rdtplan.trace.dry_run import trace_model
from rdtplan.trace.model import ZEROED, build_model, engine_config
from rdtplan.trace.platform import without_devices
from rdtplan.trace.ranks import simulated_rank
from rdtplan.trace.watch import together

CORPUS = Path(__file__).parent / "corpus"
STOCK_POISON, PLAN_POISON, GAP_POISON = 0xA5, 0x5A, 0xEE

Sources = dict[str, torch.Tensor]
"""Full tensors by source name, in manifest order."""
Way = Literal["sources", "packed"]
"""Straight out of the full tensors, or through a packed buffer as a pull delivers it."""
WAYS: tuple[Way, ...] = ("sources", "packed")


# -- inputs --------------------------------------------------------------------------------------------------


def corpus_manifest(name: str) -> list[SourceTensor]:
    """The manifest of a corpus model."""
    return from_json(CORPUS / "manifests" / f"{name}.json")


def corpus_config(name: str, parent: Path) -> Path:
    """A model directory below `parent` with the config of a corpus model."""
    config_dir = parent / name
    config_dir.mkdir(exist_ok=True)
    (config_dir / "config.json").write_text((CORPUS / "configs" / f"{name}.json").read_text())
    return config_dir


def random_sources(entries: Sequence[SourceTensor], seed: int = 0) -> Sources:
    """Real tensors of random bytes: every bit pattern of the dtype occurs."""
    generator = torch.Generator().manual_seed(seed)
    sources: Sources = {}
    for entry in entries:
        dtype = getattr(torch, entry.dtype)
        nbytes = torch.Size(entry.shape).numel() * dtype.itemsize
        raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        sources[entry.name] = raw.view(dtype).view(entry.shape)
    return sources


def finite_sources(entries: Sequence[SourceTensor], seed: int = 0) -> Sources:
    """Real tensors of random numbers, none infinite or NaN; random bytes where the dtype holds no real numbers.

    A NaN's payload is torch's affair: casting or computing element by element and in vectors gives different ones.
    """
    generator = torch.Generator().manual_seed(seed)
    sources = random_sources(entries, seed)
    for entry in entries:
        dtype = getattr(torch, entry.dtype)
        if dtype.is_floating_point and entry.dtype != "float8_e8m0fnu":
            sources[entry.name] = torch.randn(entry.shape, generator=generator).to(dtype)
    return sources


@frozen
class Rank:
    """One worker of a deployment, to be simulated."""

    config_dir: Path
    topology: InferenceTopology
    position: Position
    arguments: dict[str, Any] = field(factory=dict)
    """More engine arguments: dtype, quantization, speculative."""

    @contextlib.contextmanager
    def model(self, *, meta: bool = False) -> Iterator[torch.nn.Module]:
        """Its model in checkpoint format, nothing loaded; the rank is simulated inside the context."""
        config = engine_config(self.config_dir, self.topology, self.position, **self.arguments)
        with simulated_rank(config, self.topology, self.position):
            from vllm.config import set_current_vllm_config

            model = build_model(config, meta=meta)
            draft = draft_of(config, self.position, meta=meta)
            with set_current_vllm_config(config), without_devices():
                yield model if draft is None else _with_draft(model, draft)


def _with_draft(model: torch.nn.Module, draft: Draft) -> torch.nn.Module:
    """Both as one, as a worker holds them: loaded one after the other, and sharing since."""
    both: Any = together(model, draft.model)
    both.share_draft = lambda: draft.share(model)

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = list(weights)
        draft.load(model, lambda: iter(given))
        draft.share(model)

    both.load_weights = load_weights
    return both  # type: ignore[no-any-return]


# -- the two loads -------------------------------------------------------------------------------------------


def poison(model: torch.nn.Module, byte: int) -> None:
    """Overwrite every parameter byte. Buffers keep what the model computed: loaders may read it."""
    for parameter in model.parameters():
        parameter.untyped_storage().fill_(byte)


def stock_load(rank: Rank, sources: Sources) -> torch.nn.Module:
    """A model of `rank` that vLLM's own `load_weights` has loaded."""
    with rank.model() as model:
        load_stock(model, sources)
        return model


def planned_load(rank: Rank, program: Program, manifest: Manifest, sources: Sources, way: Way) -> torch.nn.Module:
    """Another model of `rank`, filled by executing the plan."""
    with rank.model() as model:
        load_planned(model, program, manifest, sources, way)
        return model


def load_stock(model: torch.nn.Module, sources: Sources) -> None:
    """Poison `model` and load it by its `load_weights`. Copies go in: no loader can spoil the sources.

    What a layer made of zeros is zero again before: its padding stays so.
    """
    poison(model, STOCK_POISON)
    for parameter in model.parameters():
        if getattr(parameter, ZEROED, False):
            parameter.data.zero_()
    with torch.no_grad():
        model.load_weights((name, tensor.clone()) for name, tensor in sources.items())


def load_planned(model: torch.nn.Module, program: Program, manifest: Manifest, sources: Sources, way: Way) -> None:
    """Poison `model` and execute `program` on it: constants before a module's first chunk, then copies, and local
    operations after its last chunk."""
    poison(model, PLAN_POISON)
    if hasattr(model, "share_draft"):
        model.share_draft()
    destination = Destination(model, program)
    first_touched: dict[int, list[int]] = {}
    last_touched: dict[int, list[int]] = {}
    lifetimes = program.lifetimes
    for module, first, last in zip(lifetimes.module, lifetimes.first, lifetimes.last, strict=True):
        first_touched.setdefault(first, []).append(module)
        last_touched.setdefault(last, []).append(module)
    with torch.no_grad():
        destination.fill(None)
        destination.evaluate(None)
        for chunk in range(len(program.chunks)):
            for module in first_touched.get(chunk, ()):
                destination.fill(module)
            if way == "packed":
                pairs = destination.pairs_from_packed(chunk, pack(program, manifest, chunk, sources))
            else:
                named = {program.keys.source[k] for k in chunk_keys(program, chunk)}
                pairs = destination.pairs_from_sources(chunk, {k: sources[manifest.names[k]] for k in named})
            torch._foreach_copy_(*pairs)
            for module in last_touched.get(chunk, ()):
                destination.evaluate(module)


def pack(program: Program, manifest: Manifest, chunk: int, sources: Sources) -> torch.Tensor:
    """The packed bytes of one chunk, as a producer must lay them out: flat uint8, poison in the gaps.

    Written apart from the runtime, from the meaning of Keys alone.
    """
    packed = torch.full((program.chunks.nbytes[chunk],), GAP_POISON, dtype=torch.uint8)
    for k in chunk_keys(program, chunk):
        region = program.regions[program.keys.region[k]]
        dtype = getattr(torch, program.dtype_table[program.keys.dtype[k]])
        flat = sources[manifest.names[program.keys.source[k]]].reshape(-1).view(dtype)
        piece = raw_bytes(flat.as_strided(region.shape, region.stride, region.offset))
        offset = program.keys.offset[k]
        packed[offset : offset + piece.numel()] = piece
    return packed


# -- the comparison ------------------------------------------------------------------------------------------


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in logical order, flat uint8."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def held_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of a model by name: parameters, buffers, and plain attributes of its modules."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found[f"{path}.{name}"] = value
    return found


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the bytes of every tensor of a model."""
    return {name: raw_bytes(tensor).clone() for name, tensor in held_tensors(model).items()}


def compare(
    stock: torch.nn.Module | dict[str, torch.Tensor], planned: torch.nn.Module | dict[str, torch.Tensor]
) -> dict[str, int]:
    """Name -> number of differing bytes of every tensor that differs; empty when the models are the same.

    A tensor that only one of them has, or has in another size, counts with all its bytes.
    """
    a, b = (snapshot(m) if isinstance(m, torch.nn.Module) else m for m in (stock, planned))
    differing: dict[str, int] = {}
    for name in dict.fromkeys([*a, *b]):
        x, y = a.get(name), b.get(name)
        if x is None or y is None or x.shape != y.shape:
            count = max(t.numel() for t in (x, y) if t is not None)
        else:
            count = int((x != y).sum())
        if count:
            differing[name] = count
    return differing


# -- small models, without vLLM ------------------------------------------------------------------------------


class TinyModel(torch.nn.Module):
    """A module with the one method that the dry run calls; `load(model, name, tensor)` takes every source."""

    def __init__(self, load: Callable[[Any, str, torch.Tensor], None]) -> None:
        super().__init__()
        self.load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load(self, name, tensor)


def tiny_plan(model: torch.nn.Module, entries: Sequence[SourceTensor]) -> FleetPlan:
    """The whole plan of one worker that runs `model`."""
    manifest = build_manifest(entries)
    trace = trace_model(model, manifest, Position(0, 0, 0))
    return assemble(
        DryRun(
            manifest,
            ((0,),) * len(manifest),
            [trace],
            (0,),
            Fleet(),
            ModelIdentity(type(model).__name__, "bfloat16", None, "0" * 64),
            Compiler("0", "0", "0", "cpu"),
        )
    )
