"""Transports by name."""

from __future__ import annotations

from collections.abc import Callable

from rdtexec.transport.base import ConsumerTransport, ProducerTransport
from rdtexec.transport.local import LocalConsumer, LocalProducer
from rdtexec.transport.nixl import NixlConsumer, NixlProducer

PRODUCERS: dict[str, Callable[[], ProducerTransport]] = {"local": LocalProducer, "nixl": NixlProducer}
CONSUMERS: dict[str, Callable[[], ConsumerTransport]] = {"local": LocalConsumer, "nixl": NixlConsumer}
