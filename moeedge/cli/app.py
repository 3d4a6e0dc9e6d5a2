"""The `moeedge` program: one Typer app, one module per command, imported only when that command is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import moeedge
from moeedge.cli.common import cli_errors
from moeedge.cli.options import OLD_NAMES

# command: the module under moeedge.cli, and the first paragraph of the help text as `moeedge --help` shows it
COMMANDS = {
    "chat": ("chat", "Chat with a model, or answer a single prompt with -p TEXT or text piped in."),
    "bench": ("bench", "Measure speed, acceptance and equality of the output: one row per test and mode."),
    "profile": ("profile", "Show which experts a model's tokens use, and how well the next step's can be predicted."),
    "replay": ("replay", "Replay routing traces under many policies: hit rates, uploads and bounds."),
    "fit": ("fit", "Measure what a step of a model and its draft takes, and predict what speculation gains."),
    "calibrate": ("calibrate", "Measure how long experts take on CPU, device and link, and keep it for later runs."),
    "ablate": (
        "ablate",
        "Ablate SP-MoE as its Figure 12 does: on-demand loading, prefetch, worker, batched transfers.",
    ),
    "simulate": ("simulate", "Simulate policies on a machine: GPU, CPU, link and draft as discrete events."),
    "devices": ("devices", "List the devices that can hold experts, and why the others cannot."),
    "pull": ("pull", "Download a model and its draft; an interrupted download continues."),
    "list": ("list_models", "List the models that -m and -md know by name."),
    "rm": ("rm", "Remove a downloaded model, or the remains of an unfinished download, from the hub's cache."),
    "plan": ("plan", "Show how much memory a model takes on this machine, and what fits, before it is loaded."),
    "worker": ("worker", "Serve a device of this machine to moeedge on another one."),
    "widen": ("widen", "Write a model of a larger shape that computes the same."),
    "trace": ("trace", "Look into routing traces, and read and write those of other tools."),
    "schema": (
        "schema",
        "Print the JSON Schema of a command's JSON output, or of a trace file: every key, with its meaning and unit.",
    ),
    "validate": (
        "validate",
        "Compare formulas and simulator with published figures, and the simulator with this machine.",
    ),
}
_SETTINGS: dict[str, Any] = {"pretty_exceptions_enable": False, "add_completion": False}


class LazyGroup(TyperGroup):
    """Lists the commands from COMMANDS, and imports the one that is run or whose help is shown."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, summary) in COMMANDS.items():
            self.add_command(TyperCommand(name, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """The command that the arguments name, loaded."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, load_command(str(listed.name)) if listed else None, rest

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, the import of its module included, with errors turned into exit codes."""
        with cli_errors():
            return super().invoke(ctx)


def load_command(name: str) -> Any:
    """The complete command of that name, or group of commands."""
    module_name, _ = COMMANDS[name]
    entry = getattr(import_module(f"moeedge.cli.{module_name}"), module_name)
    if not isinstance(entry, typer.Typer):
        command_app = typer.Typer(**_SETTINGS)
        command_app.command(name)(entry)
        entry = command_app
    command = typer.main.get_command(entry)
    _flow_help(command)
    return command


def _flow_help(command: Any) -> None:
    """Lets the terminal break the lines of --help; Typer keeps those of the source after the first paragraph."""
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n"))
    for inner in getattr(command, "commands", {}).values():
        _flow_help(inner)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moeedge {moeedge.__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=LazyGroup,
    name="moeedge",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: OLD_NAMES.get(name, name),
    },
)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run a Mixture-of-Experts model that does not fit your GPU: chat with it, measure it, look inside it."""
