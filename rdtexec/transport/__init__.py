"""Transports by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rdtexec.transport.base import ConsumerTransport, ProducerTransport
from rdtexec.transport.local import LocalConsumer, LocalProducer
from rdtexec.transport.nixl import NixlConsumer, NixlProducer
from rdtexec.transport.ray_rdt import RayConsumer, RayProducer

PRODUCERS: dict[str, Callable[[torch.device], ProducerTransport]] = {
    "local": LocalProducer,
    "nixl": NixlProducer,
    "ray_rdt": RayProducer,
}
CONSUMERS: dict[str, Callable[[], ConsumerTransport]] = {
    "local": LocalConsumer,
    "nixl": NixlConsumer,
    "ray_rdt": RayConsumer,
}
SETTINGS = ("auto", *PRODUCERS)


def allowed(setting: str) -> tuple[str, ...]:
    """Transports that a setting permits, best first: `auto` is local for pairs on one node, else nixl."""
    return ("local", "nixl") if setting == "auto" else (setting,)
