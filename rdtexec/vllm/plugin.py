"""The `vllm.general_plugins` entry point: makes `--weight-transfer-config '{"backend": "rdtexec"}'` work."""

from __future__ import annotations

BACKEND = "rdtexec"


def register() -> None:
    """Register both engines; called in every vLLM process, and harmless when called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rdtexec.vllm.engine", "RdtExecEngine")
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, "rdtexec.vllm.trainer", "RdtExecTrainer")
