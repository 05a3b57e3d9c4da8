"""The demo's processes: a trainer rank and a vLLM worker, each driven by commands over a pipe.

A command is (name, argument); every command is answered by ("ok", value) or ("error", text), so the parent waits for
exactly one answer a command and knows which process failed.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from attrs import frozen

from rdtexec.consumer import Consumer
from rdtexec.control import Address
from rdtexec.destination import Destination
from rdtexec.plans import load_trainer, load_worker
from rdtexec.producer import Producer
from rdtplan.errors import RdtError
from rdtplan.ir.topology import InferenceTopology, Position

Command = tuple[str, Any]
Handlers = dict[str, Callable[[Any], Any]]


class CheckpointSource:
    """Serves a trainer rank's names out of a checkpoint directory; `checkpoint` is what the trainer holds now."""

    def __init__(self, flip_byte: bool) -> None:
        self.checkpoint = ""
        self._flip_byte = flip_byte

    def start(self) -> None:
        return None

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import safe_open

        with safe_open(os.path.join(self.checkpoint, "model.safetensors"), "pt") as file:
            for name in names:
                tensor = file.get_tensor(name)
                if self._flip_byte and name.endswith("layers.1.self_attn.o_proj.weight"):
                    tensor.view(torch.uint8).view(-1)[12345] ^= 1
                yield name, tensor


def serve_commands(pipe: Connection, handlers: Handlers) -> None:
    """Answer commands until "stop" or until the parent is gone."""
    while True:
        try:
            name, argument = pipe.recv()
        except EOFError:
            return
        if name == "stop":
            pipe.send(("ok", None))
            return
        try:
            pipe.send(("ok", handlers[name](argument)))
        except RdtError as error:
            pipe.send(("error", str(error)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))


def producer_main(
    pipe: Connection, plan_path: str, rank: int, authkey: bytes, stall_timeout_s: float, flip_byte: bool
) -> None:
    """One trainer rank."""
    torch.set_num_threads(1)
    source = CheckpointSource(flip_byte)
    live: list[Producer] = []

    def start(transport: str) -> Address:
        _close_all(live)
        plan = load_trainer(plan_path, rank)
        live.append(Producer(plan, source, transport, authkey=authkey, stall_timeout_s=stall_timeout_s))
        return live[0].address

    def sync(argument: tuple[int, str]) -> Any:
        number, source.checkpoint = argument
        return live[0].sync(number)

    serve_commands(pipe, {"start": start, "sync": sync})
    _close_all(live)


@frozen
class WorkerSpec:
    """Which worker of which model a process is."""

    config_dir: str
    plan_path: str
    topology: InferenceTopology
    position: Position
    consumer_id: int
    authkey: bytes
    stall_timeout_s: float = 60.0


def consumer_main(pipe: Connection, spec: WorkerSpec) -> None:
    """One vLLM worker: a real vLLM model of its rank on CPU, filled by syncs and compared with stock `load_weights`."""
    from rdtplan.trace.model import build_model, engine_config
    from rdtplan.trace.ranks import simulated_rank

    torch.set_num_threads(1)
    live: list[Consumer] = []
    vllm_config = engine_config(spec.config_dir, spec.topology, spec.position)
    with simulated_rank(vllm_config, spec.topology, spec.position):
        model = build_model(vllm_config, meta=False)
        poison(model, 0x5A)
        vllm_config.compilation_config.static_forward_context.clear()
        oracle = build_model(vllm_config, meta=False)

        def start(argument: tuple[str, dict[int, Address]]) -> float:
            transport, producers = argument
            _close_all(live)
            started = time.perf_counter()
            plan = load_worker(spec.plan_path, spec.consumer_id, position=spec.position)
            live.append(
                Consumer(
                    plan,
                    Destination(model, plan.consumer.program),
                    transport,
                    producers,
                    authkey=spec.authkey,
                    stall_timeout_s=spec.stall_timeout_s,
                )
            )
            return time.perf_counter() - started

        def check(checkpoint: str) -> tuple[int, list[str]]:
            poison(oracle, 0xA5)
            stock_load(oracle, vllm_config, checkpoint)
            return compare(model, oracle)

        serve_commands(pipe, {"start": start, "sync": lambda number: live[0].sync(number), "check": check})
    _close_all(live)


def _close_all(live: list[Any]) -> None:
    while live:
        live.pop().close()


def poison(model: torch.nn.Module, byte: int) -> None:
    """Overwrite every parameter with one byte, so that an element that nobody writes shows."""
    for tensor in model.parameters():
        tensor.data.view(-1).view(torch.uint8).fill_(byte)


def stock_load(model: torch.nn.Module, vllm_config: Any, checkpoint: str) -> None:
    """What vLLM itself makes of a checkpoint: the oracle."""
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config

    weights: Iterable[tuple[str, torch.Tensor]] = load_file(os.path.join(checkpoint, "model.safetensors")).items()
    with set_current_vllm_config(vllm_config):
        model.load_weights(iter(weights))  # type: ignore[operator]


def compare(model: torch.nn.Module, oracle: torch.nn.Module) -> tuple[int, list[str]]:
    """(tensors compared, names that differ in any byte), over every parameter and buffer."""
    expected = dict(oracle.named_parameters()) | dict(oracle.named_buffers())
    actual = dict(model.named_parameters()) | dict(model.named_buffers())
    assert expected.keys() == actual.keys()
    wrong = [name for name in expected if not torch.equal(_bytes(expected[name]), _bytes(actual[name]))]
    return len(expected), wrong


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
