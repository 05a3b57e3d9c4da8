"""A live vLLM model as destination, through vLLM's layerwise reload.

A serving model holds *kernel tensors*: what post-processing (packing, quantization) made of the checkpoint. A reload
puts every parameter back into checkpoint format on meta; we give a module memory when its first chunk comes
(materialize), and when its last one is scattered run the post-processing and copy the result into the kernel tensors
that CUDA graphs and kernels hold (complete). What vLLM never moves to meta (router biases, biases) is written in
place.

vLLM 0.32 and 0.33 have a fault here: the unquantized mixture-of-experts method runs its experts' post-processing only
the first time, so on platforms whose experts prepack (CPU) a reload leaves raw weights where packed ones are read,
without a word. `reload_is_faulty` finds such modules; they are refused, or repaired when the user says so.
"""

from __future__ import annotations

from typing import Any

import torch

from rdtexec.destination import Destination
from rdtexec.device import with_index
from rdtplan.errors import PlanMismatch, TransferError
from rdtplan.ir.plan import Program
from rdtplan.trace.watch import Watched


class LayerwiseDestination(Destination):
    """`Destination` of a serving model; also the hooks that materialize and complete its modules."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, program: Program, *, repair_reload: bool) -> None:
        """Hold the model's checkpoint format to the plan. The model serves unchanged afterwards, whatever happens.

        PlanMismatch RDT501 when it differs; TransferError RDT631 for modules that vLLM reloads wrongly.
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
        tied = Watched(model)  # a reload gives every module a tensor of its own; the kernel tensors keep the tie
        ties = {name: tuple(a) for name, a in zip(tied.names, tied.aliases, strict=True) if a}
        self._put_on_meta()
        try:
            super().__init__(model, program, ties=ties)
            self._modules = [model.get_submodule(name) for name in program.parameters.module_names]
            self._check_modules()
        finally:
            self.abandon()
        self.device = with_index(torch.device(vllm_config.device_config.device or "cpu"))
        self.moving = True
        self._rows_of_module: dict[int, list[int]] = {}
        for row, module in enumerate(program.parameters.modules):
            self._rows_of_module.setdefault(module, []).append(row)

    def _check_modules(self) -> None:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        for name, module in zip(self.program.parameters.module_names, self._modules, strict=True):
            if is_deferred_attention_layer(module):
                raise PlanMismatch(
                    f"the plan writes attention module {name!r}, whose scales vLLM loads outside of layerwise reload",
                    fix="compile from a checkpoint without KV-cache scales",
                    code="RDT504",
                )

    # -- one sync ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Put the model into checkpoint format. Inference must be paused."""
        self._put_on_meta()
        for row in range(len(self.program.parameters)):
            self._bind(row)

    def materialize(self, module: int) -> None:
        """Give a module memory in checkpoint format."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_layer

        layer = self._modules[module]
        materialize_layer(layer, get_layerwise_info(layer))
        for row in self._rows_of_module[module]:
            self._bind(row)

    def complete(self, module: int) -> None:
        """Post-process a module and put the result where the kernels read it."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
        from vllm.model_executor.model_loader.reload import layerwise

        layer = self._modules[module]
        info = layerwise.get_layerwise_info(layer)
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        for tensor in layerwise.get_layer_tensors(layer).values():
            if hasattr(tensor, "weight_loader"):
                tensor.weight_loader = layerwise._get_original_loader(tensor)
        if self.device.type == "cuda":  # allocated on the scatter's stream, read on this one
            for tensor in layerwise.get_layer_tensors(layer).values():
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
        if info.kernel_tensors is not None:
            layerwise._copy_and_restore_kernel_tensors(layer, info)
        info.reset()

    def finish(self) -> None:
        """Give modules that the plan does not touch their kernel tensors back, and process attention layers."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self.device:
            finalize_layerwise_reload(self._model, self._vllm_config.model_config)

    def abandon(self) -> None:
        """Give every module that is in checkpoint format its kernel tensors back, with whatever they hold."""
        from vllm.model_executor.model_loader.reload import layerwise

        for layer in self._model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(layer, info)
                info.reset()

    # -- vLLM's reload -------------------------------------------------------------------------------------------------

    def _put_on_meta(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self._model)

    def _bind(self, row: int) -> None:
        name = self.program.parameters.names[row].rpartition(".")[2]
        layer = self._modules[self.program.parameters.modules[row]]
        self.tensors[row] = getattr(layer, name).data


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
