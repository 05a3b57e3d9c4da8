"""Settings of the whole test suite, and the table of faults: `pytest tests/test_faults.py --times` prints it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from tests.endings import Ending, table
from tests.ray_cluster import agree_on_token

agree_on_token()

settings.register_profile("rdtplan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rdtplan")

ROWS = pytest.StashKey[list[tuple[str, str, dict[str, Ending], str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times", action="store_true", help="print what each injected fault led to, and when all had ended"
    )


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str, str, dict[str, Ending], str], None]:
    """Write down (fault, transport, how every process ended, what recovered it)."""
    rows = request.config.stash.setdefault(ROWS, [])

    def add(fault: str, transport: str, endings: dict[str, Ending], recovery: str) -> None:
        rows.append((fault, transport, endings, recovery))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--times"):
        terminalreporter.write_line("\n" + table(config.stash.get(ROWS, [])))
