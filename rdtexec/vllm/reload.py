"""A live vLLM model as destination, through vLLM's layerwise reload.

A serving model holds *kernel tensors*: what post-processing (packing, quantization) made of the checkpoint. When the
first chunk of a module comes it is put into checkpoint format, in memory of its own (materialize); when its last one is
scattered, post-processing runs and the result is copied into the kernel tensors that CUDA graphs and kernels hold
(complete). Only modules between their first and last chunk are in that state; the others serve. vLLM's own reload puts
all modules on meta first and visits all of them again at the end, which costs more than the copying does.

Modules without post-processing (norms), and what vLLM never takes out of service (router biases, biases), are written
in place.

vLLM 0.32 and 0.33 have a fault here: the unquantized mixture-of-experts method runs its experts' post-processing only
the first time, so on platforms whose experts prepack (CPU) a reload leaves raw weights where packed ones are read,
without a word. `reload_is_faulty` finds such modules; they are refused, or repaired when the user says so.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

from rdtexec.destination import Destination
from rdtexec.device import with_index
from rdtexec.vllm.experts import check_placement
from rdtplan.errors import PlanMismatch, TransferError
from rdtplan.ir.plan import Program
from rdtplan.trace.watch import Watched


class LayerwiseDestination(Destination):
    """`Destination` of a serving model; also the hooks that materialize and complete its modules."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, program: Program, *, repair_reload: bool) -> None:
        """Hold the model's checkpoint format to the plan. The model serves unchanged afterwards, whatever happens.

        PlanMismatch RDT501 when it differs, RDT519 when its experts are placed otherwise; TransferError RDT631 for
        modules that vLLM reloads wrongly.
        """
        self._model, self._vllm_config = model, vllm_config
        self._repair = repair_reload
        self.abandon()  # a sync that failed may have left modules on meta, where ties cannot be seen
        faulty = [name for name, module in model.named_modules() if reload_is_faulty(module)]
        if faulty and not repair_reload:
            raise TransferError(
                f"vLLM reloads {len(faulty)} modules wrongly, the first is {faulty[0]!r}: its experts' post-processing "
                "runs only on the first load, so they would read raw weights as packed ones",
                fix="pass repair_reload=true to run the missing step, or use a vLLM without this fault",
                code="RDT631",
            )
        check_placement(program.experts, model)
        tied = Watched(model)  # a reload gives every module a tensor of its own; the kernel tensors keep the tie
        ties = {name: tuple(a) for name, a in zip(tied.names, tied.aliases, strict=True) if a}
        try:
            for module in model.modules():
                _put_on_meta(module)
            super().__init__(model, program, ties=ties)
            self._modules = [model.get_submodule(name) for name in program.parameters.module_names]
            self._check_modules()
            self._in_place = [is_unprocessed(module) for module in self._modules]
        finally:
            self.abandon()
        self.device = with_index(torch.device(vllm_config.device_config.device or "cpu"))
        self.moving = True
        self._rows_of_module: dict[int, list[int]] = {}
        for row, module in enumerate(program.parameters.modules[: program.parameters.held]):  # operands stand last
            self._rows_of_module.setdefault(module, []).append(row)
            if self._in_place[module]:
                self._bind(row)
        self._attention = [module for module in model.modules() if is_deferred_attention_layer(module)]

    def _check_modules(self) -> None:
        written = set(self.program.lifetimes.module)
        for k, (name, module) in enumerate(zip(self.program.parameters.module_names, self._modules, strict=True)):
            if k in written and is_deferred_attention_layer(module):
                raise PlanMismatch(
                    f"the plan writes attention module {name!r}, whose scales vLLM loads outside of layerwise reload",
                    fix="compile from a checkpoint without KV-cache scales",
                    code="RDT504",
                )

    def check(self) -> None:
        """Every expert is still in the slot for which the plan has its weights."""
        check_placement(self.program.experts, self._model)

    # -- one sync ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Nothing yet: a module leaves serving when its first chunk comes. Inference must be paused."""

    def materialize(self, module: int) -> None:
        """Put a module into checkpoint format, in memory of its own; one without post-processing stays as it is."""
        if self._in_place[module]:
            return
        layer = self._modules[module]
        _put_on_meta(layer)
        materialize_layer(layer, get_layerwise_info(layer))
        for row in self._rows_of_module[module]:
            self._bind(row)

    def complete(self, module: int) -> None:
        """Post-process a module and put the result where the kernels read it."""
        if self._in_place[module]:
            return
        layer = self._modules[module]
        info = get_layerwise_info(layer)
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        for tensor in get_layer_tensors(layer).values():
            if hasattr(tensor, "weight_loader"):  # may still be the one of an earlier reload by vLLM itself
                tensor.weight_loader = layerwise._get_original_loader(tensor)
        if self.device.type == "cuda":  # allocated on the scatter's stream, read on this one
            for tensor in get_layer_tensors(layer).values():
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream())
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            with set_current_vllm_config(self._vllm_config), self.device:
                method.process_weights_after_loading(layer)
                if self._repair and reload_is_faulty(layer):
                    method.moe_kernel.fused_experts.process_weights_after_loading(layer)  # type: ignore[attr-defined]
            if hasattr(layer, "update_param_tp_status"):
                layer.update_param_tp_status()
        layerwise._copy_and_restore_kernel_tensors(layer, info)
        info.reset()

    def finish(self) -> None:
        """Process attention layers, which derive weights of their own from those of other modules."""
        with self.device:
            for layer in self._attention:
                layer.process_weights_after_loading(self._vllm_config.model_config.dtype)

    def abandon(self) -> None:
        """Give every module that is in checkpoint format its kernel tensors back, with whatever they hold."""
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(layer, info)
                info.reset()

    def _bind(self, row: int) -> None:
        name = self.program.parameters.names[row].rpartition(".")[2]
        layer = self._modules[self.program.parameters.modules[row]]
        self.tensors[row] = getattr(layer, name).data


def _put_on_meta(layer: torch.nn.Module) -> None:
    """Set a module's kernel tensors aside and give it the shapes of the checkpoint instead."""
    info = get_layerwise_info(layer)
    info.kernel_tensors = get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    info.load_numel_total = 0  # anything but None: this module is being reloaded
    restore_layer_on_meta(layer, info)


def is_unprocessed(module: torch.nn.Module) -> bool:
    """Do the kernels read this module's tensors as the checkpoint has them? To be asked in checkpoint format."""
    method = getattr(module, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        if type(method).process_weights_after_loading is not QuantizeMethodBase.process_weights_after_loading:
            return False
    parameters, buffers = get_layerwise_info(module).kernel_tensors or ({}, {})
    return {name: _layout(t) for name, t in get_layer_tensors(module).items()} == {
        name: _layout(t) for name, t in (parameters | buffers).items()
    }


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def reload_is_faulty(module: torch.nn.Module) -> bool:
    """Does vLLM skip a post-processing step of this module on every load but the first?"""
    method = getattr(module, "quant_method", None)
    if type(method).__name__ != "UnquantizedFusedMoEMethod":
        return False
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    step = getattr(type(experts), "process_weights_after_loading", None)
    if step is None:
        return False
    return not step.__module__.endswith("modular_kernel")  # the base class' no-op lives there
