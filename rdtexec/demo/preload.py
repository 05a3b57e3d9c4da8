"""Imported once by the server that the demo's processes are forked from."""

from rdtplan.trace.model import import_vllm

import_vllm()

import safetensors.torch  # noqa: E402, F401
import vllm.engine.arg_utils  # noqa: E402
import vllm.model_executor.models.qwen3_moe  # noqa: E402, F401

import rdtexec.demo.processes  # noqa: E402, F401
