"""The dry run of a live vLLM worker, in its own process: another model of its configuration, on meta, is traced.

The worker's process groups are the real ones, so nothing about the rank is simulated, and nobody sees another rank. The
live model is not part of it: the second one is registered in a configuration of its own, caches that hand out modules
of other models are empty meanwhile, and every global that a model's constructor moves (random numbers, the offloader)
is put back, whatever happens.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from attrs import frozen

from rdtplan import __version__
from rdtplan.expected import prediction_layers
from rdtplan.ir.manifest import Manifest
from rdtplan.ir.plan import Compiler, ModelIdentity
from rdtplan.ir.topology import Position
from rdtplan.ir.traces import RankTrace
from rdtplan.trace.dry_run import trace_model
from rdtplan.trace.model import build_model, identity_of, read_config
from rdtplan.trace.platform import live_target
from rdtplan.trace.ranks import fresh_caches


@frozen
class LiveTrace:
    """What a live worker knows about itself: its writes, its model, and what it runs."""

    trace: RankTrace
    model: ModelIdentity
    compiler: Compiler
    predicting: tuple[str, ...]
    """Patterns of source names that only a draft model would load: it is not traced here."""


def trace_worker(vllm_config: Any, manifest: Manifest, position: Position) -> LiveTrace:
    """Trace this process' own rank. TraceError when no plan can express its loaders; the live model is as it was."""
    import vllm
    from vllm.config import set_current_vllm_config

    with _put_back():
        own = _config_of_its_own(vllm_config)
        try:
            model = build_model(own, meta=True)
            with set_current_vllm_config(own):
                # Ranks of a stage run the same loaders: one of them is enough to see what they do out of sight.
                trace = trace_model(model, manifest, position, unseen=position.dp == position.tp == 0)
        finally:  # layers and configuration know each other: rotary tables, which are real, would wait for a collection
            own.compilation_config.static_forward_context.clear()
    compiler = Compiler(__version__, vllm.__version__, torch.__version__.split("+")[0], live_target())
    config = _config_json(own.model_config)
    return LiveTrace(trace, identity_of(config, own), compiler, prediction_layers(config))


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """What vLLM and torch keep in globals is the same afterwards."""
    from vllm.model_executor.offloader import base as offloader

    generators = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with (
        torch.random.fork_rng(devices=generators),
        mock.patch.object(offloader, "_instance", offloader.NoopOffloader()),
        fresh_caches(),
    ):
        yield


def _config_of_its_own(vllm_config: Any) -> Any:
    """A copy in which another model of the same names can be made: a configuration knows every attention layer.

    Nothing is compiled for that model, it never runs. Models and quantization methods write into their configuration.
    """
    from vllm.config import CompilationMode

    compilation = copy.copy(vllm_config.compilation_config)
    for field in dataclasses.fields(compilation):
        value = getattr(compilation, field.name)
        if not field.init and isinstance(value, (dict, list, set)):  # what a run collects, and no setting
            setattr(compilation, field.name, type(value)())
    compilation.static_forward_context = {}  # the registry of layers, whatever else a release collects
    compilation.mode = CompilationMode.NONE
    own = copy.copy(vllm_config)
    own.compilation_config = compilation
    own.model_config = copy.deepcopy(vllm_config.model_config)
    own.quant_config = copy.deepcopy(vllm_config.quant_config)
    return own


def _config_json(model_config: Any) -> dict[str, Any]:
    """The `config.json` of the model that runs, from its directory or out of the hub's cache."""
    if Path(model_config.model).is_dir():
        return read_config(model_config.model)
    from transformers.utils import cached_file

    found = cached_file(model_config.model, "config.json", revision=model_config.revision, local_files_only=True)
    return read_config(Path(found).parent)
