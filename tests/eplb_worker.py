"""A worker's engine under EPLB, in a process of a GPU target on tensors of the host: prints what it found as JSON.

usage: python tests/eplb_worker.py

EPLB is for GPUs, so no vLLM engine runs with it here. The worker is one rank of two: vLLM's own model, post-processed,
with EPLB set up by vLLM's own functions; the engine of `rdtexec` over it, and a producer in this process.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from rdtexec.plans import load_trainer
from rdtexec.producer import Producer
from rdtplan.compiler import Fleet, compile_plan, place_experts
from rdtplan.errors import RdtError
from rdtplan.inputs.experts import read_placement
from rdtplan.ir.file import write_plan
from rdtplan.ir.manifest import Ints
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import positions
from rdtplan.trace import platform
from tests import oracle, placements
from tests import quantized as cases

KEY = b"k" * 32
OTHER = (7, 6, 5, 4, 3, 2, 1, 0, 7, 7, 0, 5)


class Source:
    """A trainer rank; `before_last` runs when all but the last group have been gathered."""

    def __init__(self, sources: oracle.Sources, last: str) -> None:
        self.sources, self.last = sources, last
        self.before_last: Callable[[], None] = lambda: None

    def start(self) -> None:
        return None

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        if self.last in names:
            self.before_last()
        for name in names:
            yield name, self.sources[name]


def set_up(model: Any, row: Ints) -> Callable[[Ints], None]:
    """EPLB as vLLM has it after loading; what moves experts to other slots as a rebalancing ends."""
    from vllm.distributed.eplb.eplb_state import compute_logical_maps

    layers, slots = model.num_moe_layers, len(row)
    experts = model.num_logical_experts
    table = torch.full((layers, experts, 1024), -1)
    counts = torch.zeros((layers, experts), dtype=torch.long)

    def commit(row: Ints) -> None:
        for layer in range(layers):
            logical, count = compute_logical_maps(torch.tensor(row), experts)
            table[layer].fill_(-1)
            table[layer, :, : logical.shape[-1]] = logical
            counts[layer] = count

    commit(row)
    model.set_eplb_state(torch.zeros((layers, slots), dtype=torch.int32), table, counts)
    return commit


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except RdtError as error:
        return str(error)
    return ""


def post_processed(model: Any, config: Any) -> Any:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model


def main() -> None:
    platform.install(placements.TARGET)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(run(Path(directory))), flush=True)


def run(directory: Path) -> dict[str, Any]:
    from vllm.config import WeightTransferConfig, set_current_vllm_config

    from rdtexec.vllm.engine import RdtExecEngine
    from rdtexec.vllm.experts import live_placement
    from rdtplan.trace.model import build_model, engine_config
    from rdtplan.trace.ranks import simulated_rank

    config_dir, entries, _ = cases.model_dir(cases.CASES["bf16-moe"], directory / "model")
    sources = oracle.finite_sources(entries)
    fleet = Fleet(topology=placements.TP2, target=placements.TARGET)
    plan = compile_plan(config_dir, entries, fleet, jobs=1)
    without = compile_plan(config_dir, entries, evolve(fleet, topology=evolve(fleet.topology, redundant_experts=None)))
    position = positions(fleet.topology)[1]
    found: dict[str, Any] = {}

    config = engine_config(config_dir, fleet.topology, position)
    config.parallel_config.rank = 1
    config.device_config.device = torch.device("cpu")
    with simulated_rank(config, fleet.topology, position), set_current_vllm_config(config):
        model: Any = build_model(config, meta=False)
        oracle.poison(model, 0)
        post_processed(model, config)
        first = tuple(plan.consumers[0].program.experts.placed(0))
        commit = set_up(model, first)
        engine = RdtExecEngine(WeightTransferConfig(backend="rdtexec"), config, torch.device("cpu"), model)
        last = plan.manifest.names[plan.groups[-1].first]
        source = Source(sources, last)
        trainers: list[Producer] = []

        def init(plan: FleetPlan, **extra: Any) -> None:
            path = directory / f"{plan.identity}.plan"
            write_plan(plan, path)
            trainers.append(Producer(load_trainer(path, 0), source, "local", authkey=KEY, stall_timeout_s=20.0))
            info = {"producers": {"0": trainers[-1].address}, "authkey": KEY.hex(), "plan": str(path)} | extra
            engine.init_transfer_engine(engine.parse_init_info(info))

        def sync(number: int) -> None:
            """One sync of this worker alone."""
            said: list[str] = []
            serving = threading.Thread(target=lambda: said.append(refusal(lambda: trainers[-1].sync(number, [1]))))
            serving.start()
            try:
                engine.start_weight_update()
                engine.update_weights({"sync_idx": number})
                engine.finish_weight_update()
            finally:
                serving.join()
                found.setdefault("trainer", []).append(said[0])

        def different(row: Ints) -> list[str]:
            """Tensors that are not what stock vLLM leaves there with this map."""
            return [
                name
                for name, data in oracle.snapshot(model).items()
                if name in wanted[row] and not torch.equal(data, wanted[row][name])
            ]

        wanted = {row: kernel_tensors(config_dir, fleet, position, sources, row) for row in (first, OTHER)}
        found["async"] = refusal(lambda: init(plan))
        config.parallel_config.eplb_config.use_async = False
        found["compiled at init"] = refusal(lambda: init(plan, producers={}, compile_at="/nowhere"))
        found["no EPLB in the plan"] = refusal(lambda: init(without))
        init(plan)
        sync(0)
        found["first"], found["told apart"] = different(first), different(OTHER)
        commit(OTHER)
        found["moved"] = refusal(engine.start_weight_update)
        found["moved, anew"] = refusal(lambda: init(plan))
        rows = directory / "rows.json"
        rows.write_text(json.dumps(live_placement(model)))
        init(place_experts(plan, read_placement(rows)))
        sync(0)
        found["placed anew"] = different(OTHER)
        source.before_last = lambda: commit(first)
        found["moved in a sync"] = refusal(lambda: sync(1))
        found["finish"] = refusal(engine.finish_weight_update)
        source.before_last = lambda: None
        commit(OTHER)
        sync(2)
        found["mended"] = different(OTHER)
        commit((*OTHER[:11], -1))
        found["impossible"] = refusal(engine.start_weight_update)
        config.parallel_config.enable_eplb = False
        found["no EPLB in the worker"] = refusal(lambda: init(plan))
        engine.shutdown()
        for trainer in trainers:
            trainer.close()
    found["compared"] = len(wanted[first])
    return found


def kernel_tensors(config_dir: Path, fleet: Fleet, position: Any, sources: oracle.Sources, row: Ints) -> dict[str, Any]:
    """What stock vLLM leaves in every tensor of another model of this rank, post-processed, with `row` as its map."""
    from unittest import mock

    from vllm.config import set_current_vllm_config
    from vllm.distributed.eplb.eplb_state import EplbState

    from rdtplan.trace.model import build_model, engine_config

    config = engine_config(config_dir, fleet.topology, position)
    with mock.patch.object(EplbState, "build_initial_global_physical_to_logical_map", lambda *_: list(row)):
        with set_current_vllm_config(config):
            model = build_model(config, meta=False)
            model.load_weights((name, t.clone()) for name, t in sources.items())  # type: ignore[operator]
            return oracle.snapshot(post_processed(model, config))


if __name__ == "__main__":
    main()
