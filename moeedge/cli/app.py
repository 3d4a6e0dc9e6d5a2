"""The `moeedge` program: one Typer app, one file per command."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

import moeedge
from moeedge.cli import (
    ablate,
    bench,
    calibrate,
    chat,
    devices,
    list_models,
    plan,
    profile,
    pull,
    replay,
    rm,
    simulate,
    trace,
    validate,
    widen,
    worker,
)

app = typer.Typer(
    name="moeedge",
    help="Run a Mixture-of-Experts model that does not fit your GPU: chat with it, measure it, look inside it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(chat.chat)
app.command()(bench.bench)
app.command()(profile.profile)
app.command()(replay.replay)
app.add_typer(trace.trace_app)
app.command()(calibrate.calibrate)
app.command()(ablate.ablate)
app.command()(simulate.simulate)
app.add_typer(validate.validate_app)
app.command()(devices.devices)
app.command()(pull.pull)
app.command("list")(list_models.list_models)
app.command()(rm.rm)
app.command()(plan.plan)
app.command()(worker.worker)
app.command()(widen.widen)


def _flow_help(group: typer.Typer) -> None:
    """Lets the terminal break the lines of --help: Typer would keep the source's own behind the first paragraph."""
    for command in group.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            _flow_help(inner.typer_instance)


_flow_help(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moeedge {moeedge.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run a Mixture-of-Experts model that does not fit your GPU: chat with it, measure it, look inside it."""
