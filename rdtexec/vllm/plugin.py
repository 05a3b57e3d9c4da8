"""The `vllm.general_plugins` entry point: makes `--weight-transfer-config '{"backend": "rdtexec"}'` work."""

from __future__ import annotations

import logging
import os

BACKEND = "rdtexec"


def register() -> None:
    """Register both engines; called in every vLLM process, and harmless when called again."""
    _log_to_stderr()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rdtexec.vllm.engine", "RdtExecEngine")
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, "rdtexec.vllm.trainer", "RdtExecTrainer")


def _log_to_stderr() -> None:
    """One line a sync beside vLLM's own log, unless the application has set up this logger; RDTEXEC_LOG_LEVEL rules."""
    log = logging.getLogger("rdtexec")
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [rdtexec] %(message)s", "%m-%d %H:%M:%S"))
        log.addHandler(handler)
        log.propagate = False
        log.setLevel(os.environ.get("RDTEXEC_LOG_LEVEL", "INFO").upper())
