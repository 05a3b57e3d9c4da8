"""Draft models: what a worker holds beside the model when it decodes speculatively, and what the two share.

A draft model has names of its own, `draft.` and its parameter's name; a multi-token-prediction layer loads from the
model's own checkpoint, any other draft model from source names that begin with `draft.`. vLLM loads it like any model
and then gives it the model's embedding and head, where it has none of its own. So it is traced with memory of its own;
afterwards vLLM's own code shares, and what was written into memory that is no longer there goes nowhere.

Of an EAGLE checkpoint with an embedding or head of its own, vLLM compares the values with the model's and shares them
if they are equal. Here they count as different. A worker that shares them has another geometry, and refuses the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from attrs import frozen

from rdtplan.errors import TraceError
from rdtplan.ir.topology import Position
from rdtplan.trace.model import build_model
from rdtplan.trace.watch import DRAFT, has_draft_model

Weights = Iterable[tuple[str, torch.Tensor]]


@frozen
class Draft:
    """A draft model beside the model, built and not loaded."""

    model: torch.nn.Module
    own: bool
    """Does it load from the model's checkpoint?"""
    proposer: Any
    """vLLM's, without its runner."""

    def load(self, model: torch.nn.Module, weights: Callable[[], Weights]) -> None:
        """Load both as vLLM does, the draft model last; each call of `weights` gives all of them."""
        model.load_weights((n, t) for n, t in weights() if self.own or not n.startswith(DRAFT))  # type: ignore[operator]
        self.model.load_weights(  # type: ignore[operator]
            (n if self.own else n.removeprefix(DRAFT), t) for n, t in weights() if self.own or n.startswith(DRAFT)
        )

    def share(self, model: torch.nn.Module) -> None:
        """Let vLLM give the draft model what it takes from the model."""
        self.proposer.model = self.model
        language = model.get_language_model() if hasattr(model, "get_language_model") else model  # type: ignore[operator]
        with mock.patch.object(torch, "equal", lambda *_: False):
            self.proposer._maybe_share_embeddings(language)
            self.proposer._maybe_share_lm_head(language)


def draft_of(vllm_config: Any, position: Position, *, meta: bool) -> Draft | None:
    """The draft model of the simulated rank, None where it holds none.

    TraceError RDT218 for a method whose draft model is made in another way.
    """
    if not has_draft_model(vllm_config, position.pp):
        return None
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.spec_decode.eagle import EagleProposer

    speculative = vllm_config.speculative_config
    if speculative.uses_draft_model():
        kind: Any = DraftModelProposer
    elif speculative.use_eagle() and not (speculative.use_gemma4_mtp() or speculative.use_step3p5_mtp()):
        kind = EagleProposer
    else:
        raise TraceError(
            f"draft models of method {speculative.method!r} cannot be compiled yet",
            fix="compile without --speculative-config; the draft model then keeps the weights that it started with",
            code="RDT218",
        )
    proposer = object.__new__(kind)
    proposer.vllm_config, proposer.speculative_config = vllm_config, speculative
    proposer.use_local_argmax_reduction = False
    config = proposer._create_draft_vllm_config()

    def initialize() -> Any:
        prefix = "draft_model" if kind is DraftModelProposer else ""
        return initialize_model(vllm_config=config, model_config=speculative.draft_model_config, prefix=prefix)

    model = build_model(config, meta=meta, initialize=initialize)
    return Draft(model, speculative.draft_model_config.model == vllm_config.model_config.model, proposer)
