"""The commands that look at finished plans. They import neither torch nor vLLM.

Exit codes: 0 success, 1 an error or wrong usage; `diff` exits 0 when the plans are the same and 2 when they differ.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from rdtplan.errors import InputError

PIPE_WIDTH = 160
"""Columns when the output is no terminal: wide enough that nothing is left out."""
AS_JSON = click.option("--json", "as_json", is_flag=True, help="JSON for machines.")
PLAN = click.argument("plan", type=click.Path(path_type=Path))


def show(lines: Iterable[str]) -> None:
    """Print lines; colours are for terminals, and `click.echo` takes them out elsewhere."""
    click.echo("\n".join(lines))


def show_json(value: Any) -> None:
    import orjson

    click.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def terminal_width(pipe: int = PIPE_WIDTH) -> int:
    """Columns to keep to: COLUMNS, else the terminal, else `pipe`."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        return pipe
    return max(20, shutil.get_terminal_size().columns)


def check_output(output: Path, *inputs: Path | None) -> None:
    """Before any work: InputError RDT108 when `output` cannot be written, or is one of the files that are read."""
    from rdtplan.output import place_of

    try:
        place = place_of(output)
    except OSError as error:
        raise InputError(f"--output: cannot write {output}: {error.strerror}", code="RDT108") from None
    for path in inputs:
        if path is not None and path.resolve() == place:
            raise InputError(
                f"--output {output} is {path}, which this command reads", fix="name another file", code="RDT108"
            )


def write_output(output: Path, data: bytes) -> None:
    """Write a file whole or not at all. InputError RDT108 when that cannot be done."""
    from rdtplan.output import write_whole

    try:
        write_whole(output, data)
    except OSError as error:
        raise InputError(f"--output: cannot write {output}: {error.strerror}", code="RDT108") from None


def need_partner(option: str, value: Any, *others: tuple[str, Any]) -> None:
    """InputError RDT108 when others of (option, value) are given without the option that they belong to."""
    given = [name for name, v in others if v is not None]
    if value is None and given:
        raise InputError(f"{' and '.join(given)} without {option}: there is nothing to use it for", code="RDT108")


@contextlib.contextmanager
def open_plan(path: Path) -> Iterator[Any]:
    """A plan to look at. Reports trust the tables; where that fails, the plan is verified and its first finding told.

    A failure on a plan that is sound is a bug and passes through.
    """
    from rdtplan.ir.file import PlanFile

    with PlanFile(path) as file:
        try:
            yield file
        except (LookupError, ValueError, ArithmeticError, TypeError, AssertionError, MemoryError):
            from rdtplan.verify import refuse, verify_fleet

            refuse(verify_fleet(file.fleet()))
            raise


@click.command()
@PLAN
@click.option("--worker", type=int, metavar="ID", help="One worker: what it pulls, from whom, in which order.")
@click.option("--producer", type=int, metavar="RANK", help="One trainer rank: what it gathers and serves.")
@click.option("--group", metavar="N|LABEL", help="One gather group: names, owners, who pulls it.")
@click.option("--chunk", type=int, metavar="N", help="One chunk of --worker (0 unless given): every slice of it.")
@AS_JSON
def inspect(
    plan: Path, worker: int | None, producer: int | None, group: str | None, chunk: int | None, as_json: bool
) -> None:
    """Show what PLAN will move, from whom to whom, and the memory it takes."""
    from rdtplan.report import drill
    from rdtplan.report import inspect as overview

    asked = [name for name, v in (("--producer", producer), ("--group", group), ("--chunk", chunk)) if v is not None]
    if len(asked) > 1 or (worker is not None and asked not in ([], ["--chunk"])):
        both = " and ".join([*(["--worker"] if worker is not None else []), *asked])
        raise InputError(f"{both} do not go together: inspect shows one thing at a time", code="RDT108")
    render: Any
    with open_plan(plan) as file:
        if chunk is not None:
            data, render = drill.chunk(file, worker or 0, chunk), drill.render_chunk
        elif worker is not None:
            data, render = drill.worker(file, worker), drill.render_worker
        elif producer is not None:
            data, render = drill.producer(file, producer), drill.render_producer
        elif group is not None:
            data, render = drill.group(file, group), drill.render_group
        else:
            data, render = overview.summarize(file), overview.render_summary
    show_json(data) if as_json else show(render(data, terminal_width()))


@click.command()
@PLAN
@AS_JSON
def mem(plan: Path, as_json: bool) -> None:
    """Predict the peak memory of every worker and trainer rank, by part."""
    from rdtplan.report.memory import forecast, render_forecast

    with open_plan(plan) as file:
        data = forecast(file)
    show_json(data) if as_json else show(render_forecast(data, terminal_width()))


@click.command()
@PLAN
@click.argument("name", metavar="NAME|PATTERN")
@click.option("--parameter", "parameters", is_flag=True, help="NAME is a parameter of the vLLM model, not a source.")
@AS_JSON
def explain(plan: Path, name: str, parameters: bool, as_json: bool) -> None:
    """Follow one weight of PLAN from its owners to its place on every worker, or back from a vLLM parameter."""
    from rdtplan.report import explain as report

    with open_plan(plan) as file:
        found = report.explain(file, name, parameters=parameters)
    show_json(report.as_json(found)) if as_json else show(report.render(found, terminal_width()))


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@AS_JSON
def diff(before: Path, after: Path, as_json: bool) -> None:
    """Compare two plans: what caused the difference, and what follows from it.

    Exits 0 when both have the same identity, 2 when they differ, 1 on an error.
    """
    from rdtplan.report import diff as report
    from rdtplan.report.compare import compare

    with open_plan(before) as a, open_plan(after) as b:
        found = compare(a, b)
    show_json(report.as_json(found)) if as_json else show(report.render(found, terminal_width()))
    sys.exit(0 if found.same else 2)


def runtime_rules(transport: str) -> Any:
    """The runtime's own scheduler and serving state; only the outermost layer joins the two packages."""
    from rdtexec.plans import TrainerPlan
    from rdtexec.schedule import run
    from rdtexec.serving import ServeState
    from rdtplan.report.simulate import Rules

    def serve_state(plan: Any, rank: int, consumers: dict[int, Any]) -> ServeState:
        producer = plan.producer(rank)
        part = TrainerPlan(
            identity=plan.field("identity"),
            producer=producer,
            consumers={s.consumer_id: consumers[s.consumer_id] for s in producer.servings},
            consumer_ids=tuple(consumers),
            manifest=plan.field("manifest"),
            ownership=plan.field("ownership"),
            groups=plan.field("groups"),
            topology=plan.field("topology"),
            settings=plan.field("settings"),
        )
        return ServeState(part)

    return Rules(run, serve_state, needs_slots=transport == "nixl", frees_on_landing=transport == "nixl")


def cost_options(command: Any) -> Any:
    """Options that say what a plan does not know: links, latency, gather."""
    for option in (
        click.option("--transport", type=click.Choice(["nixl", "local"]), default="nixl", show_default=True),
        click.option("--first-sync", is_flag=True, help="Sync 0: one pull at a time."),
        click.option("--scatter-bandwidth", help="Rate of the scatter on a worker. Default: unlimited."),
        click.option("--gather-time", default="0", help="Time to gather the largest group; others in proportion."),
        click.option("--latency", default="20us", show_default=True, help="Time of one control message."),
        click.option("--bandwidth", default="50GB/s", show_default=True, help="Rate of each link, 50GB/s or 400Gb/s."),
    ):
        command = option(command)
    return command


def run_simulation(
    file: Any,
    bandwidth: str,
    latency: str,
    gather_time: str,
    scatter_bandwidth: str | None,
    first_sync: bool,
    transport: str,
) -> Any:
    """One sync of an open plan under the given costs."""
    from rdtplan.report.simulate import Costs, simulate
    from rdtplan.report.units import parse_rate, parse_seconds

    costs = Costs(
        bandwidth=parse_rate(bandwidth, "--bandwidth"),
        latency_s=parse_seconds(latency, "--latency"),
        gather_s=parse_seconds(gather_time, "--gather-time"),
        scatter_bandwidth=parse_rate(scatter_bandwidth, "--scatter-bandwidth")
        if scatter_bandwidth is not None
        else math.inf,
        first_sync=first_sync,
    )
    return simulate(file, costs, runtime_rules(transport))


@click.command()
@PLAN
@cost_options
@click.option(
    "--actual", type=click.Path(path_type=Path), help="run.jsonl of a recorded run, laid over the prediction."
)
@click.option("--actual-sync", type=int, help="Which recorded sync. Default: the last.")
@AS_JSON
def simulate(plan: Path, actual: Path | None, actual_sync: int | None, as_json: bool, **costs: Any) -> None:
    """Predict one sync of PLAN on a virtual clock, and name its bottleneck."""
    from rdtplan.report.timeline import as_json as to_json
    from rdtplan.report.timeline import read_run, render

    need_partner("--actual", actual, ("--actual-sync", actual_sync))
    records = read_run(actual, actual_sync) if actual is not None else None
    with open_plan(plan) as file:
        found = run_simulation(file, **costs)
    show_json(to_json(found, records)) if as_json else show(render(found, terminal_width(), records))


@click.command()
@PLAN
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="HTML file to write.")
@cost_options
def report(plan: Path, output: Path, **costs: Any) -> None:
    """Write PLAN as one self-contained HTML page: fleet, load, memory, timeline, weights, findings."""
    from rdtplan.report import page
    from rdtplan.report.explain import explain as explain_names
    from rdtplan.report.inspect import summarize
    from rdtplan.report.memory import forecast
    from rdtplan.report.units import plural
    from rdtplan.verify import unwaived, verify_fleet

    check_output(output, plan)
    with open_plan(plan) as file:
        findings = verify_fleet(file.fleet())
        wrong = unwaived(findings, file.field("waivers"))
        data = page.page_data(
            file,
            summarize(file),
            forecast(file),
            run_simulation(file, **costs),
            explain_names(file, "*"),
            findings,
        )
    write_output(output, page.render_page(data).encode())
    click.echo(f"{output}: {output.stat().st_size:,} bytes, {len(data['weights'])} forms of weights")
    if wrong:
        click.secho(f"the plan is unsound, {plural(len(wrong), 'finding')}: run `rdtplan verify {plan}`", fg="red")


COMMANDS = (inspect, mem, explain, diff, simulate, report)
