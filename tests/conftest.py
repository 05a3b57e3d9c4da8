"""Settings of the whole test suite."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("rdtplan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rdtplan")
