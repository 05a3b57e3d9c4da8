"""Weight sources: what they declare, what they give, and whole syncs out of them between real processes.

Trainer ranks are processes of torch.distributed (gloo), sharded modules are real FSDP2 modules.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rdtexec.demo.fleet import Child, children, collect, new_authkey
from rdtexec.demo.processes import serve_commands
from rdtexec.plans import check_live_manifest, load_trainer
from rdtexec.producer import Producer
from rdtexec.sources import (
    CheckpointSource,
    LocalModuleSource,
    ModuleSource,
    ShardSource,
    Source,
    split_experts,
    strip_wrappers,
)
from rdtplan.compiler import DryRun, assemble
from rdtplan.errors import InputError, PlanMismatch, RdtError, TransferError
from rdtplan.inputs.manifests import checkpoint_files, from_weight_source
from rdtplan.ir.file import write_plan
from rdtplan.ir.manifest import Ints, Piece
from rdtplan.ir.pieces import chunked
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import InferenceTopology, TransferSettings
from tests.fleet import Holder, Setup, Strike, _context, consumer_main, full_tensor, reference_manifest
from tests.plans import COMPILER, MODEL, Scenario, Sizes, traces_of

RANKS_S = 120.0


# -- ranks -----------------------------------------------------------------------------------------------------------


def rank_main(pipe: Connection, rank: int, ranks: int, store: str, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        pipe.send(("ok", function(rank, *args)))
        pipe.recv()
    except EOFError:
        pass
    except Exception:
        pipe.send(("error", traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def on_ranks(ranks: int, directory: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(rank, *args)` returns on each rank of a gloo process group."""
    store = str(directory / f"store-{function.__name__}-{ranks}")
    mains: dict[str, Any] = {f"rank {r}": (rank_main, (r, ranks, store, function, args)) for r in range(ranks)}
    with children(_context(), mains, stop_timeout_s=10.0) as started:
        answers = collect(list(started.values()), RANKS_S)
    return [answers[f"rank {r}"] for r in range(ranks)]


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + RANKS_S
    while not file.exists():
        assert time.monotonic() < deadline, f"there is no {file}"
        time.sleep(0.01)


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except RdtError as error:
        return str(error)
    return ""


def module_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module tree with these parameters."""
    root = Holder()
    for path, tensor in tensors.items():
        *modules, leaf = path.split(".")
        module: torch.nn.Module = root
        for part in modules:
            if part not in module._modules:
                module.add_module(part, Holder())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    return root


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, so that no NaN is touched by arithmetic."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b))


# -- one process -----------------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """What transformers' models have: tied weights, persistent and other buffers, a missing bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.LayerNorm(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("correction", torch.arange(4.0))
        self.register_buffer("cache", torch.zeros(7), persistent=False)
        self.register_buffer("steps", torch.tensor([3]))


def test_a_plain_module_declares_what_a_checkpoint_would_hold() -> None:
    """Tied parameters once, persistent buffers too; integers are not cast; a left-out name is nowhere."""
    module = Tied()
    source = ModuleSource(module, rename=lambda n: None if n == "norm.bias" else f"m.{n}", dtype=torch.bfloat16)
    assert [(m.name, m.dtype, m.shape, m.owners) for m in source.metadata] == [
        ("m.correction", torch.bfloat16, (4,), None),
        ("m.steps", torch.int64, (1,), None),
        ("m.embed.weight", torch.bfloat16, (5, 3), None),
        ("m.norm.weight", torch.bfloat16, (3,), None),
    ]
    assert source.held_names() is None
    got = dict(source.gather(["m.embed.weight", "m.steps"]))
    assert list(got) == ["m.embed.weight", "m.steps"] and not got["m.embed.weight"].requires_grad
    assert same(got["m.embed.weight"], module.embed.weight.to(torch.bfloat16)) and got["m.steps"].item() == 3


def test_a_dtype_for_each_name() -> None:
    """Checkpoints mix dtypes: a router's correction stays float32."""
    module = Tied()
    source = ModuleSource(module, dtype=lambda name: None if name == "correction" else torch.bfloat16)
    assert {m.name: m.dtype for m in source.metadata}["correction"] == torch.float32
    assert same(dict(source.gather(["correction"]))["correction"], module.correction)


def test_weights_are_those_of_now() -> None:
    """Replaced, changed in place or assigned: the next pass sees it. A parameter that is gone is named."""
    module = Tied()
    source = ModuleSource(module)
    with torch.no_grad():
        module.norm.weight.add_(1)
    module.norm.bias = torch.nn.Parameter(torch.full((3,), 7.0))
    got = dict(source.iter_full())
    assert same(got["norm.weight"], torch.full((3,), 2.0)) and same(got["norm.bias"], torch.full((3,), 7.0))
    module.norm.bias = None
    with pytest.raises(TransferError, match=r"no tensor 'norm\.bias' any more") as failed:
        list(source.gather(["norm.bias"]))
    assert failed.value.code == "RDT607"


def test_names_are_checked() -> None:
    with pytest.raises(InputError, match="two weights of the name 'w'") as failed:
        ModuleSource(Tied(), rename=lambda _: "w")
    assert failed.value.code == "RDT106"
    with pytest.raises(TransferError, match="'absent', which it does not hold") as unknown:
        list(ModuleSource(Tied()).gather(["absent"]))
    assert unknown.value.code == "RDT607"
    assert strip_wrappers("_orig_mod.layers.0._checkpoint_wrapped_module.w") == "layers.0.w"


def test_fused_experts_become_the_checkpoints_names() -> None:
    """Against what transformers itself saves for Qwen3-MoE."""
    transformers = pytest.importorskip("transformers")
    config = json.loads((Path(__file__).parent / "corpus/configs/Qwen3MoeForCausalLM.json").read_text())
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**config)).to(torch.bfloat16)
    from transformers.core_model_loading import revert_weight_conversion

    saved = revert_weight_conversion(model, model.state_dict())
    got = dict(ModuleSource(model, split=split_experts).iter_full())
    assert got.keys() == saved.keys()
    assert all(same(got[name], saved[name]) for name in saved)
    assert sum(".experts.7." in name for name in got) == 3 * config["num_hidden_layers"]


def test_split_must_not_depend_on_values() -> None:
    def split(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name if tensor.is_meta else f"{name}.other", tensor

    source = ModuleSource(Tied(), split=split)
    with pytest.raises(TransferError, match=r"`split` gave 'norm\.weight' when"):
        list(source.gather(["norm.weight"]))


def test_a_split_parameter_is_made_once_a_group_and_let_go() -> None:
    """However its names are ordered; and nothing of it stays after the group."""
    weight = torch.randn(4, 6, 2)
    made: list[weakref.ref[torch.Tensor]] = []

    def split(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if not tensor.is_meta:
            made.append(weakref.ref(tensor))
        return split_experts(name, tensor)

    module = module_of({"a.experts.gate_up_proj": weight, "b.weight": torch.randn(2)})
    source = ModuleSource(module, split=split, dtype=torch.bfloat16)
    order = ["a.experts.3.up_proj.weight", "b.weight", "a.experts.0.gate_proj.weight"]
    got = dict(source.gather(order))
    assert list(got) == order
    assert same(got[order[0]], weight[3, 3:].to(torch.bfloat16))
    assert same(got[order[2]], weight[0, :3].to(torch.bfloat16))
    assert len(made) == 2
    del got
    assert all(r() is None for r in made)


# -- FSDP2 -----------------------------------------------------------------------------------------------------------


def network() -> torch.nn.Module:
    """Rows that neither 2 nor 4 ranks divide; some ranks get none of a tensor."""
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3), torch.nn.LayerNorm(3))


def shard(module: torch.nn.Module) -> torch.nn.Module:
    """The last norm is the root's own, as in a language model."""
    for layer in module:  # type: ignore[attr-defined]
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    return fully_shard(module)


def fsdp_gathers(rank: int) -> Any:
    """Group by group in an order of its own, counting what is gathered and what stays alive."""
    original = {n: p.detach().clone() for n, p in network().named_parameters()}
    module = shard(network())
    source = ModuleSource(module, rename=lambda name: f"model.{name}", dtype=torch.bfloat16)
    calls: list[torch.dtype] = []
    stock = DTensor.full_tensor

    def counted(self: DTensor, **options: Any) -> torch.Tensor:
        calls.append(self.dtype)
        return stock(self, **options)

    DTensor.full_tensor = counted  # type: ignore[method-assign]
    found: dict[str, Any] = {"metadata": [(m.name, m.shape, m.owners) for m in source.metadata]}
    found["gathered for the metadata"] = len(calls)
    found["partners"] = source.partners("model.0.weight")
    groups = [
        ["model.3.weight", "model.3.bias"],
        ["model.0.bias"],
        ["model.2.weight", "model.0.weight", "model.2.bias"],
    ]
    found["wrong"], found["calls"], found["alive"] = [], [], []
    source.start()
    for group in groups:
        del calls[:]
        tensors = dict(source.gather(group))
        found["calls"].append(list(calls))
        want = {name: original[name.removeprefix("model.")].to(torch.bfloat16) for name in group}
        found["wrong"] += [name for name in group if not same(tensors[name], want[name])]
        alive = [weakref.ref(tensor) for tensor in tensors.values()]
        del tensors
        found["alive"].append(sum(ref() is not None for ref in alive))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp_groups_are_gathered_one_at_a_time(tmp_path: Path, ranks: int) -> None:
    """Full shapes without a gather, exact values, shards cast before they are sent; no tensor outlives its group."""
    for found in on_ranks(ranks, tmp_path, fsdp_gathers):
        assert found["metadata"] == [
            ("model.0.weight", (7, 5), None),
            ("model.0.bias", (7,), None),
            ("model.2.weight", (3, 7), None),
            ("model.2.bias", (3,), None),
            ("model.3.weight", (3,), None),
            ("model.3.bias", (3,), None),
        ]
        assert found["gathered for the metadata"] == 0 and found["partners"] == tuple(range(ranks))
        assert found["wrong"] == [] and found["alive"] == [0, 0, 0]
        assert found["calls"] == [[torch.bfloat16] * n for n in (2, 1, 3)]


def fsdp_after_evaluation(rank: int) -> Any:
    """A forward pass without backward leaves full parameters behind, which the optimizer then does not update."""
    module = shard(network())
    shards = list(module.parameters())
    optimizer = torch.optim.SGD(shards, lr=0.5)
    source = ModuleSource(module)
    before = {name: tensor.clone() for name, tensor in source.iter_full()}
    module(torch.ones(2, 5)).square().sum().backward()
    with torch.no_grad():
        module(torch.ones(2, 5))
    stale = any(not isinstance(p, DTensor) for p in module.parameters())
    optimizer.step()
    want = [p.full_tensor().detach() for p in shards]
    got = dict(source.iter_full())
    assert len(got) == len(want)
    return {
        "stale": stale,
        "moved": any(not same(got[name], before[name]) for name in got),
        "right": all(same(a, b) for a, b in zip(got.values(), want, strict=True)),
        "again": all(same(a, b) for a, b in zip(dict(source.iter_full()).values(), want, strict=True)),
    }


def test_shards_are_sent_and_not_what_an_evaluation_left(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, fsdp_after_evaluation):
        assert found == {"stale": True, "moved": True, "right": True, "again": True}


def other_placements(rank: int) -> Any:
    """Column shards, and a 2-D mesh with a replicated dimension."""
    mesh = init_device_mesh("cpu", (2, 2))
    weight = torch.arange(35.0).view(7, 5)
    module = Holder()
    placed = {"a": [Replicate(), Shard(1)], "b": [Shard(0), Shard(0)], "c": [Shard(1), Replicate()]}
    for name, placements in placed.items():
        module.register_parameter(name, torch.nn.Parameter(distribute_tensor(weight, mesh, placements)))
    return [same(tensor, weight) for _, tensor in ModuleSource(module).iter_full()]


def test_any_placement_is_gathered(tmp_path: Path) -> None:
    assert on_ranks(4, tmp_path, other_placements) == [[True] * 3] * 4


# -- ranks that hold different names ---------------------------------------------------------------------------------


def stages_of_shards(rank: int) -> Any:
    """Two pipeline stages, each sharded over two ranks of its own; layers are numbered from 0 on every stage."""
    stage, mesh = rank // 2, init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(stage)
    tensors = {"layers.0.w": torch.randn(3, 5), "layers.1.w": torch.randn(3, 5)}
    module = module_of(tensors)
    fully_shard(module, mesh=mesh["dp"])

    def rename(name: str) -> str:
        layer = int(name.split(".")[1]) + 2 * stage
        return f"model.layers.{layer}.w"

    source = LocalModuleSource(module, rename=rename)
    mine = {rename(name): tensor for name, tensor in tensors.items()}
    passed = list(source)
    elsewhere = f"model.layers.{2 * (1 - stage)}.w"
    return {
        "metadata": [(m.name, m.shape, m.owners) for m in source.metadata],
        "held": sorted(source.held_names() or ()),
        "right": all(same(tensor, mine[name]) for name, tensor in passed if tensor is not None),
        "passed": [(name, tensor is not None) for name, tensor in passed],
        "full": [name for name, _ in source.iter_full()],
        "elsewhere": refusal(lambda: list(source.gather([elsewhere]))),
        "partners": source.partners(f"model.layers.{2 * stage}.w"),
    }


def test_pipeline_stages_agree_on_the_whole_model(tmp_path: Path) -> None:
    found = on_ranks(4, tmp_path, stages_of_shards)
    for rank, one in enumerate(found):
        stage = rank // 2
        mine = [f"model.layers.{2 * stage + i}.w" for i in range(2)]
        assert one["metadata"] == [
            (f"model.layers.{layer}.w", (3, 5), (0, 1) if layer < 2 else (2, 3)) for layer in range(4)
        ]
        assert one["held"] == one["full"] == mine and one["right"]
        assert one["passed"] == [(name, True) for name in mine], "layers of another stage are not iterated"
        assert one["elsewhere"].startswith("RDT607") and f"rank {rank} is asked for" in one["elsewhere"]
        assert one["partners"] == ((0, 1) if stage == 0 else (2, 3))


def local_experts(rank: int) -> Any:
    """Each rank has two of four experts, fused, and a copy of everything else."""
    experts = torch.arange(4 * 4 * 2.0).view(4, 4, 2)
    tensors = {"embed.weight": torch.ones(3, 2), "layers.0.experts.gate_up_proj": experts[2 * rank : 2 * rank + 2]}
    source = LocalModuleSource(module_of(tensors), split=partial(split_experts, first=2 * rank))
    got = dict(source.iter_full())
    return {
        "owners": {m.name: m.owners for m in source.metadata},
        "right": all(
            same(got[f"layers.0.experts.{e}.up_proj.weight"], experts[e, 2:]) for e in (2 * rank, 2 * rank + 1)
        ),
    }


def test_expert_parallel_ranks_hold_their_experts(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, local_experts):
        assert found["right"] and len(found["owners"]) == 9 and found["owners"]["embed.weight"] == (0, 1)
        for expert in range(4):
            assert found["owners"][f"layers.0.experts.{expert}.gate_proj.weight"] == (expert // 2,)


def disagreeing_ranks(rank: int) -> Any:
    same_name = {"w": torch.ones(2, 3 + rank)}
    twice = {"w": torch.ones(1), "v": torch.ones(1)} if rank else {"w": torch.ones(1)}
    mesh = DeviceMesh("cpu", [0])
    elsewhere = Holder()
    elsewhere.register_parameter("w", torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])))
    return {
        "shapes": refusal(lambda: LocalModuleSource(module_of(same_name))),
        "twice": refusal(lambda: LocalModuleSource(module_of(twice), rename=lambda _: "w")),
        "absent": refusal(lambda: ModuleSource(elsewhere)),
        "owners": [m.owners for m in LocalModuleSource(elsewhere).metadata],
        "alike": [m.owners for m in LocalModuleSource(module_of({"w": torch.ones(1)})).metadata],
    }


def test_ranks_that_disagree_are_refused_on_every_rank(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, disagreeing_ranks)
    for found in (first, second):
        assert found["shapes"].startswith("RDT114: trainer rank 0 has 'w' as torch.float32 (2, 3), rank 1 as")
        assert found["twice"].startswith("RDT106") and "'w'" in found["twice"]
        assert found["owners"] == [(0,)] and found["alike"] == [None]
    assert first["absent"] == "" and "'w' lives on ranks [0]" in second["absent"]
    assert second["absent"].startswith("RDT114")


# -- checkpoints -----------------------------------------------------------------------------------------------------


def write_checkpoint(directory: Path, weights: dict[str, torch.Tensor], files: int, *, index: bool) -> Path:
    """Names dealt out to files in turn."""
    directory.mkdir(parents=True)
    placed = {name: f"model-{i % files:05d}.safetensors" for i, name in enumerate(weights)}
    for file in sorted(set(placed.values())):
        save_file({n: weights[n].contiguous() for n, f in placed.items() if f == file}, str(directory / file))
    if index:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return directory


def checkpoint_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"model.layers.{i}.w": torch.randn(3, i + 1, generator=generator) for i in range(12)}


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_checkpoint_is_split_by_file(tmp_path: Path, ranks: int, index: bool) -> None:
    """Each rank reads its files; together they have every name once, and all declare the same."""
    weights = checkpoint_weights(1)
    directory = write_checkpoint(tmp_path / "a", weights, 4, index=index)
    sources = [CheckpointSource(directory, rank=r, ranks=ranks) for r in range(ranks)]
    assert all(source.metadata == sources[0].metadata for source in sources)
    assert [m.name for m in sources[0].metadata] == list(weights), "layers in order, not as text"
    files = checkpoint_files(directory)
    got: dict[str, torch.Tensor] = {}
    for source in sources:
        mine = dict(source.iter_full())
        assert not got.keys() & mine.keys()
        assert (source.held_names() is None) == (ranks == 1)
        assert len({files[name] for name in mine}) in (4 // ranks, 4 // ranks + 1)
        got |= mine
    assert got.keys() == weights.keys() and all(same(got[n], weights[n]) for n in weights)


def test_another_checkpoint_of_the_same_model(tmp_path: Path) -> None:
    """`use` changes to it, names what differs otherwise, and then stays with the old one."""
    first, second = checkpoint_weights(1), checkpoint_weights(2)
    source = CheckpointSource(write_checkpoint(tmp_path / "a", first, 3, index=True))
    source.use(write_checkpoint(tmp_path / "b", second, 2, index=False))
    assert all(same(tensor, second[name]) for name, tensor in source.iter_full())
    wrong = {
        "dtype": second | {"model.layers.3.w": second["model.layers.3.w"].half()},
        "shape": second | {"model.layers.3.w": torch.ones(4)},
        "missing": {n: t for n, t in second.items() if n != "model.layers.3.w"},
    }
    for kind, weights in wrong.items():
        with pytest.raises(PlanMismatch, match=r"'model\.layers\.3\.w'") as refused:
            source.use(write_checkpoint(tmp_path / kind, weights, 2, index=True))
        assert refused.value.code == "RDT503" and str(tmp_path / kind) in str(refused.value)
    with pytest.raises(PlanMismatch, match=r"'model\.new\.w' is float32 \(1,\), in the checkpoint before not there"):
        source.use(write_checkpoint(tmp_path / "extra", second | {"model.new.w": torch.ones(1)}, 2, index=True))
    assert all(same(tensor, second[name]) for name, tensor in source.iter_full())
    split = CheckpointSource(tmp_path / "a", rank=0, ranks=2)
    with pytest.raises(PlanMismatch, match="must keep its files"):
        split.use(tmp_path / "b")


def test_errors_of_a_checkpoint_name_file_and_tensor(tmp_path: Path) -> None:
    weights = checkpoint_weights(1)
    directory = write_checkpoint(tmp_path / "a", weights, 4, index=True)
    with pytest.raises(InputError, match="4 safetensors files, which cannot be split over 5") as few:
        CheckpointSource(directory, ranks=5)
    assert few.value.code == "RDT114"
    with pytest.raises(TransferError, match=r"rank 1 is asked for 'model\.layers\.0\.w'"):
        list(CheckpointSource(directory, rank=1, ranks=2).gather(["model.layers.0.w"]))
    with pytest.raises(InputError, match="no safetensors file") as empty:
        CheckpointSource(tmp_path)
    assert empty.value.code == "RDT103"

    source = CheckpointSource(directory)
    name, file = "model.layers.5.w", directory / "model-00001.safetensors"
    held = {n: weights[n] for n, path in checkpoint_files(directory).items() if path == file}
    assert name in held
    replace(file, held | {name: torch.ones(9)})
    check_read(source, name, file, r"is torch\.float32 \(9,\), it was torch\.float32 \(3, 6\)")
    replace(file, {n: t for n, t in held.items() if n != name})
    check_read(source, name, file, "cannot be read")
    file.write_bytes(file.read_bytes()[:-4])
    check_read(source, name, file, "cannot be read")
    file.unlink()
    check_read(source, name, file, "cannot be read")

    copy = write_checkpoint(tmp_path / "b", weights, 4, index=False)
    (copy / "copy.safetensors").write_bytes((copy / "model-00001.safetensors").read_bytes())
    with pytest.raises(InputError, match=r"is in copy\.safetensors and in model-00001\.safetensors") as twice:
        CheckpointSource(copy)
    assert twice.value.code == "RDT106"


def replace(file: Path, weights: dict[str, torch.Tensor]) -> None:
    """By renaming, as a trainer should."""
    save_file(weights, str(file.with_suffix(".new")))
    file.with_suffix(".new").rename(file)


def check_read(source: CheckpointSource, name: str, file: Path, what: str) -> None:
    source.start()
    with pytest.raises(TransferError, match=what) as failed:
        list(source.gather([name]))
    assert failed.value.code == "RDT607" and str(file) in str(failed.value) and repr(name) in str(failed.value)


# -- vLLM's own view -------------------------------------------------------------------------------------------------


def test_both_of_vllms_interfaces(tmp_path: Path) -> None:
    """0.32 calls `metadata` and batches by its own groups; 0.33 reads it. Ours can be mixed into vLLM's class."""
    from vllm.distributed.weight_transfer.base import WeightSource

    class Mixed(CheckpointSource, WeightSource):
        """With vLLM's `groups` and `iter_groups`."""

    weights = checkpoint_weights(1)
    source = Mixed(write_checkpoint(tmp_path / "a", weights, 4, index=True), rank=1, ranks=2)
    assert source.metadata() is source.metadata and from_weight_source(source)[0].owners == (0,)
    batches = list(source.iter_groups())
    assert [names for names, _ in batches] == source.groups()
    held = source.held_names()
    assert held == {n for n, path in checkpoint_files(tmp_path / "a").items() if path.stem[-1] in "23"}
    for names, tensors in batches:
        for name, tensor in zip(names, tensors, strict=True):
            assert tensor is None if name not in held else same(tensor, weights[name])
    assert source.owned_names(1) == [name for name, _ in source.iter_local()]
    assert source.implements_iter_full() and source.implements_iter_local()
    assert source.metadata[0].mesh_shape == (1,) and source.metadata[0].placements is None


# -- whole syncs -----------------------------------------------------------------------------------------------------

SIZES = Sizes(layers=3, dense_layers=1, hidden=6, heads=4, kv_heads=2, head_dim=3, intermediate=4, experts=4, vocab=11)


class Trainer:
    """A trainer rank whose weights of sync n are `full_tensor(..., n)`, behind one of the sources."""

    def __init__(self, kind: str, scenario: Scenario, plan: FleetPlan, rank: int, directory: Path) -> None:
        self.kind, self.rank, self.directory = kind, rank, directory
        self.manifest = reference_manifest(scenario, plan)
        ranks = plan.ownership.ranks
        mine = {
            name: full_tensor(self.manifest, k, 0)
            for k, name in enumerate(self.manifest.names)
            if kind in ("fsdp", "shards") or rank in plan.ownership.owners(k)
        }
        self.source: Source
        if kind == "checkpoint":
            self.source = CheckpointSource(directory / "sync-0", rank=rank, ranks=ranks)
        else:
            self.module = module_of({f"wrapped.{name}": tensor for name, tensor in mine.items()})
            if kind in ("fsdp", "shards"):
                for layer in self.module.wrapped.model.layers.children():  # type: ignore[union-attr]
                    fully_shard(layer)
                fully_shard(self.module)
                make = ModuleSource if kind == "fsdp" else ShardSource
                self.source = make(self.module, rename=self.rename)
            else:
                self.source = LocalModuleSource(self.module, rename=self.rename)

    @staticmethod
    def rename(name: str) -> str:
        return name.removeprefix("wrapped.")

    def train(self, sync: int) -> None:
        """The weights of sync `sync`, in place."""
        if isinstance(self.source, CheckpointSource):
            self.source.use(self.directory / f"sync-{sync}")
            return
        order = {name: k for k, name in enumerate(self.manifest.names)}
        for path, parameter in self.module.named_parameters():
            full = full_tensor(self.manifest, order[self.rename(path)], sync)
            if isinstance(parameter, DTensor):
                parts = full.chunk(dist.get_world_size())
                if self.rank < len(parts):
                    parameter.to_local().data.copy_(parts[self.rank])
            else:
                parameter.data.copy_(full)


def mark_gathers(source: Any, directory: Path, rank: int) -> None:
    """From now on, a file for each gather that begins, so that another process can wait for it."""
    gather = source.gather
    begun = 0

    def marked(names: Any) -> Any:
        nonlocal begun
        begun += 1
        (directory / f"rank {rank}, gather {begun}").touch()
        return gather(names)

    source.gather = marked


def trainer_main(pipe: Connection, setup: Setup, rank: int, kind: str, store: str) -> None:
    torch.set_num_threads(1)
    ranks = setup.plan.ownership.ranks
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    plan = load_trainer(setup.path, rank)
    trainer = Trainer(kind, setup.scenario, setup.plan, rank, Path(setup.path).parent)
    live: list[Producer] = []

    def start(_: Any) -> Any:
        check_live_manifest(plan, trainer.source)
        live.append(
            Producer(
                plan, trainer.source, setup.transport, authkey=setup.authkey, stall_timeout_s=setup.stall_timeout_s
            )
        )
        return live[0].address

    def sync(argument: int | tuple[int, list[int]]) -> Any:
        number, only = argument if isinstance(argument, tuple) else (argument, None)
        trainer.train(number)
        return live[0].sync(number, only)

    serve_commands(
        pipe,
        {
            "start": start,
            "sync": sync,
            "mark": lambda _: mark_gathers(trainer.source, Path(setup.path).parent, rank),
            "refusal": lambda _: refusal(lambda: start(None)),
        },
    )
    for producer in live:
        producer.close()
    dist.destroy_process_group()


def owned_plan(scenario: Scenario, owners: tuple[Ints, ...], kind: str) -> FleetPlan:
    traces, trace_of, _ = traces_of(scenario)
    pieces: tuple[tuple[Piece, ...], ...] = ()
    if kind == "shards":
        shapes = [scenario.manifest.shape(k) for k in range(len(scenario.manifest))]
        pieces = tuple(chunked(shape, 0, range(scenario.trainer_ranks)) for shape in shapes)
    return assemble(DryRun(scenario.manifest, owners, traces, trace_of, scenario.fleet, MODEL, COMPILER, pieces=pieces))


@contextlib.contextmanager
def fleet(
    kind: str, scenario: Scenario, owners: tuple[Ints, ...], directory: Path, transport: str, stall_s: float = 30.0
) -> Iterator[tuple[list[Child], list[Child]]]:
    """(trainer ranks, workers), started and not connected."""
    plan = owned_plan(scenario, owners, kind)
    path = directory / "fleet.plan"
    write_plan(plan, path)
    setup = Setup(scenario, plan, str(path), transport, new_authkey(), stall_s, None, "", 60.0, (), {})
    mains: dict[str, Any] = {
        f"producer {r}": (trainer_main, (setup, r, kind, str(directory / "store"))) for r in range(plan.ownership.ranks)
    }
    mains |= {f"worker {c}": (consumer_main, (setup, c)) for c in range(scenario.topology.workers)}
    with children(_context(), mains, stop_timeout_s=10.0) as started:
        yield (
            [child for name, child in started.items() if name.startswith("producer")],
            [child for name, child in started.items() if name.startswith("worker")],
        )


def connect(trainers: list[Child], workers: list[Child]) -> dict[int, Any]:
    """The addresses of the producers, to which these workers are connected."""
    for child in trainers:
        child.tell("start")
    addresses = {rank: collect([child], 60.0)[child.name] for rank, child in enumerate(trainers)}
    for child in workers:
        child.tell("start", addresses)
    collect(workers, 60.0)
    return addresses


def run_syncs(trainers: list[Child], workers: list[Child], syncs: int) -> None:
    """Every parameter of every worker, element by element, after each sync."""
    connect(trainers, workers)
    for number in range(syncs):
        for child in [*trainers, *workers]:
            child.tell("sync", number)
        collect([*trainers, *workers], 60.0)
        for child in workers:
            child.tell("check", number)
        assert collect(workers, 60.0) == {child.name: [] for child in workers}


@pytest.mark.parametrize("transport", ["local", "nixl"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_syncs_from_an_fsdp_trainer(tmp_path: Path, ranks: int, transport: str) -> None:
    """The plan's order is not the module's, shards are uneven, and `gather_lookahead` is 0: one group at a time."""
    scenario = Scenario(
        sizes=SIZES,
        topology=InferenceTopology(tensor_parallel=2, expert_parallel=True),
        settings=TransferSettings(gather_lookahead=0),
        trainer_ranks=ranks,
        shuffled=True,
        seed=3,
    )
    with fleet("fsdp", scenario, scenario.owners, tmp_path, transport) as (trainers, workers):
        run_syncs(trainers, workers, 3)


GATHERED_TOGETHER = Scenario(
    sizes=SIZES,
    topology=InferenceTopology(tensor_parallel=2),
    settings=TransferSettings(gather_lookahead=0),
    trainer_ranks=2,
)


def errors_of(children: list[Child]) -> list[str]:
    """What each says about the sync under way, which must fail, and not by the tests' deadline."""
    found = []
    for child in children:
        assert child.pipe.poll(60.0), f"{child.name} hangs"
        status, text = child.pipe.recv()
        assert status == "error", (child.name, text)
        found.append(text)
    return found


def sync_without_worker_1(trainers: list[Child], workers: list[Child], number: int, addresses: Any) -> None:
    """The next sync is right: no rank takes a collective of the failed one for its own."""
    workers[0].tell("start", addresses)
    collect(workers[:1], 60.0)
    for child in trainers:
        child.tell("sync", (number, [0]))
    workers[0].tell("sync", number)
    collect([*trainers, workers[0]], 60.0)
    workers[0].tell("check", number)
    assert collect(workers[:1], 60.0) == {"worker 0": []}


def test_a_rank_that_fails_does_not_leave_its_partners_in_a_gather(tmp_path: Path) -> None:
    """A worker dies when rank 0 is inside a collective that rank 1 has no credit for: both ranks end, and name it."""
    with fleet("fsdp", GATHERED_TOGETHER, GATHERED_TOGETHER.owners, tmp_path, "local") as (trainers, workers):
        addresses = connect(trainers, workers)
        for child in trainers:
            child.tell("mark")
        workers[1].tell("strike", Strike("half free", signal.SIGSTOP))
        collect([*trainers, workers[1]], 60.0)
        for child in [*trainers, *workers]:
            child.tell("sync", 0)
        wait_for(tmp_path / "rank 0, gather 2")
        assert not (tmp_path / "rank 1, gather 2").exists()
        os.kill(workers[1].process.pid, signal.SIGKILL)
        for text in errors_of([*trainers, workers[0]]):
            assert "consumer 1 is gone" in text, text
        sync_without_worker_1(trainers, workers, 1, addresses)


def test_ranks_with_different_live_sets_do_not_part_in_a_gather(tmp_path: Path) -> None:
    """One rank never begins, the other is in its first collective: both end, each with its reason."""
    with fleet("fsdp", GATHERED_TOGETHER, GATHERED_TOGETHER.owners, tmp_path, "local", 3.0) as (trainers, workers):
        addresses = connect(trainers, workers[:1])
        trainers[0].tell("sync", (0, [0]))
        trainers[1].tell("sync", 0)
        workers[0].tell("sync", 0)
        for text in errors_of([*trainers, workers[0]]):
            assert "consumer 1 has not connected" in text, text
        sync_without_worker_1(trainers, workers, 1, addresses)


@pytest.mark.parametrize("transport", ["local", "nixl"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_syncs_from_shards_as_they_are(tmp_path: Path, ranks: int, transport: str) -> None:
    """FSDP2 rows with an uneven tail, or none: each rank serves its own, no tensor is gathered."""
    scenario = Scenario(
        sizes=SIZES,
        topology=InferenceTopology(tensor_parallel=2, expert_parallel=True),
        settings=TransferSettings(gather_lookahead=0, max_chunk_bytes=200),
        trainer_ranks=ranks,
    )
    with fleet("shards", scenario, scenario.owners, tmp_path, transport) as (trainers, workers):
        run_syncs(trainers, workers, 3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_syncs_from_stages_and_experts(tmp_path: Path, ranks: int) -> None:
    """Pipeline stages whose experts live on single ranks."""
    scenario = Scenario(
        sizes=SIZES,
        topology=InferenceTopology(tensor_parallel=2),
        settings=TransferSettings(stages_in_flight=2),
        trainer_ranks=ranks,
        ownership="pipeline+experts",
        seed=1,
    )
    with fleet("local", scenario, scenario.owners, tmp_path, "nixl") as (trainers, workers):
        run_syncs(trainers, workers, 3)


def test_syncs_from_a_checkpoint_split_over_ranks(tmp_path: Path) -> None:
    """Files that cut through layers; each sync another directory."""
    scenario = Scenario(sizes=SIZES, topology=InferenceTopology(data_parallel=2), trainer_ranks=2)
    for sync in range(3):
        weights = {n: full_tensor(scenario.manifest, k, sync) for k, n in enumerate(scenario.manifest.names)}
        write_checkpoint(tmp_path / f"sync-{sync}", weights, 3, index=True)
    owner = {m.name: m.owners for m in CheckpointSource(tmp_path / "sync-0", ranks=2).metadata}
    owners = tuple(owner[name] or () for name in scenario.manifest.names)
    assert set(owners) == {(0,), (1,)}
    with fleet("checkpoint", scenario, owners, tmp_path, "local") as (trainers, workers):
        run_syncs(trainers, workers, 3)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("fsdp", "is gathered by trainer ranks [0, 1] together, the plan gives it [0]"),
        ("checkpoint", "the plan has trainer rank 0 serve"),
    ],
)
def test_a_plan_with_other_owners_is_refused(tmp_path: Path, kind: str, reason: str) -> None:
    """It would hang in a collective, or ask for what is not there."""
    scenario = Scenario(sizes=SIZES, trainer_ranks=2)
    weights = {n: full_tensor(scenario.manifest, k, 0) for k, n in enumerate(scenario.manifest.names)}
    write_checkpoint(tmp_path / "sync-0", weights, 3, index=True)
    owners = ((0,),) * len(scenario.manifest.names)
    with fleet(kind, scenario, owners, tmp_path, "local") as (trainers, _):
        for child in trainers:
            child.tell("refusal")
        answers = collect(trainers, 60.0)
    assert answers["producer 0"].startswith("RDT503") and reason in answers["producer 0"]
