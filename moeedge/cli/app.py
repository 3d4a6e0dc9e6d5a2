"""The `moeedge` program: one Typer app, a module per command, or for several, imported only when asked for."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from textwrap import wrap
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import moeedge
from moeedge.cli.common import cli_errors
from moeedge.cli.declare import short_params
from moeedge.cli.foreign import COMMAND_NAMES
from moeedge.cli.spelling import Setting, Speller, name_options, unknown_command
from moeedge.errors import InputError

# the first paragraph of each command's help text, as `--help` of its group shows it. The product imports nothing of the
# lab: its commands are names here.
COMMANDS = {
    "chat": "Chat with a model, or answer a single prompt with -p TEXT or text piped in.",
    "pull": "Download a model of the catalog or of the Hugging Face hub, and its draft.",
    "list": "List the models on this machine; with --all those of the catalog, with --fits those that can run here.",
    "show": "Show what a model is: architecture, size, context, experts, licence, chat template.",
    "rm": "Delete a downloaded model, or what is left of an unfinished download.",
    "ps": "List running moeedge processes of this user: their models and the memory that they take.",
    "plan": "Show how much memory a model needs, and what fits, before it is downloaded or loaded.",
    "devices": "List the devices that can hold experts (GPUs, other machines), and why others cannot.",
    "doctor": "Check the installation and this machine, and say what you should fix.",
    "worker": "Lend a device of this machine, such as its GPU, to moeedge on another one.",
    "bench": "Measure speed next to stock llama.cpp, and check that the answers are the same.",
    "profile": "Show which experts a model's tokens use, and how well the next ones can be predicted.",
    "calibrate": "Measure how fast this machine computes and moves a model's experts, and keep it for later runs.",
    "lab": "Research tools: replay routing traces, predict speeds, repeat experiments of published papers.",
    "lab trace": "Look into routing traces (the experts that every token used), and import them from other tools.",
    "lab replay": "Replay routing traces: how many of a text's experts each policy would have had on the device.",
    "lab simulate": "Predict the speed of a model on a machine that is not here, with policies of expert placement.",
    "lab budget": "Estimate the quality that a model loses with at most N experts per layer (MoE-Spec).",
    "lab fit": "Measure what a step of a model and its draft takes, and predict what drafts gain.",
    "lab ablate": "Measure what each part of SP-MoE gains: loading on demand, prefetch, a worker, batched transfers.",
    "lab pair": "Measure how well a draft model's hidden states predict the target's experts, layer by layer.",
    "lab validate": "Compare formulas and simulator with published figures, and the simulator with this machine.",
    "lab rivals": "Measure moeedge next to llama.cpp's and ik_llama.cpp's own programs, in turns.",
    "lab widen": "Write a larger model with the same answers, to measure the speed of real sizes without their "
    "weights.",
    "lab surface": "Show what drafts gain over stock llama.cpp at its best, by acceptance and draft cost.",
    "lab make-model": "Write a model of a real one's shapes, types and size with random weights, to measure speed "
    "without a download.",
    "lab schema": "Print the JSON Schema of a command's JSON output, or of a trace file: every key, with its meaning "
    "and unit.",
}
_PANELS = {  # of `moeedge --help`: the first command of each
    "chat": "Everyday",
    "bench": "Measuring",
    "lab": "Research",
}
# the modules that have another name than their commands
_MODULES = {
    **dict.fromkeys(("list", "show", "pull", "rm"), "models"),
    **dict.fromkeys(("devices", "doctor", "ps", "worker"), "machine"),
    **dict.fromkeys(("lab ablate", "lab pair"), "sp_moe"),
    "lab make-model": "widen",
}
# options without which a command line has the word chat
_CHATS = {"-m", "--model", "-hf", "-p", "--prompt", "-f", "--file"}
_MODEL_COMMANDS = ("chat", "bench", "profile", "plan")
WORDS = {"run": ("-m", "-p")}  # by the command as typed: the options that words without a dash stand for
# words of Typer's messages about values that are no numbers
_KINDS = {"valid integer": "a whole number", "valid number": "a number", "valid float": "a number"}
_HELP = ["-h", "--help"]
_MANY_OPTIONS = 40  # from which --help shows the most used, and --help-all the others
_SPELLING_WIDTH, _TEXT_WIDTH = 26, 50  # characters of the two columns of the short help
_SETTINGS: dict[str, Any] = {"pretty_exceptions_enable": False, "add_completion": False}
_GROUP = _SETTINGS | {"no_args_is_help": True, "context_settings": {"help_option_names": _HELP}}
_UsageError: Any = typer.BadParameter.__base__  # Typer's own class or, in older versions, click's
_REWORDED = (
    (r"Input should be a valid integer\b.*", "it takes a whole number"),
    (r"Input should be a valid number\b.*", "it takes a number"),
    (r"Input should be a valid boolean\b.*", "it takes 1 or 0"),
    (r"Input should be greater than or equal to (\S+)", r"it must be \1 or more"),
    (r"Input should be less than or equal to (\S+)", r"it must be \1 or less"),
    (r"Value error, ", ""),
    (r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", r"Unexpected word: \1"),
)


class LazyGroup(TyperGroup):
    """Lists the commands from COMMANDS, and imports the one that is run or whose help is shown."""

    prefix = ""  # of its commands' names in COMMANDS

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        panel = ""
        for name, summary in COMMANDS.items():
            parent, _, own_name = name.rpartition(" ")
            if parent == self.prefix.strip():
                panel = _PANELS.get(name, panel)
                self.add_command(TyperCommand(own_name, help=summary, rich_help_panel=panel or None))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the options before the command."""
        try:
            return super().parse_args(ctx, self._with_command(ctx, args))
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                raise
            with cli_errors():
                raise _usage_error(error, None) from None

    def _with_command(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments with the option for `help` or `version`, or with the word chat before options of chat."""
        first, *rest = args or [""]
        if first == "--help-all":
            return ["--help"]
        if self.prefix:
            return args
        if first in ("help", "version"):
            return [*rest, f"--{first}"]
        own = {spelling for param in self.get_params(ctx) for spelling in param.opts}
        starts = _CHATS & {arg.partition("=")[0] for arg in args}
        if starts and first.startswith("-") and first not in own and Speller("chat", load_command("chat")).knows(first):
            return ["chat", *args]
        return args

    def get_params(self, ctx: Any) -> Any:
        """The program's own options, flags without a value's type."""
        return _bare_flags(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """The command that the arguments name, loaded, and its arguments as it declares them."""
        typed, *rest = args
        own_name = typed if self.prefix else COMMAND_NAMES.get(typed, typed)
        name = f"{self.prefix}{own_name}"
        if own_name not in self.commands:
            if ctx.resilient_parsing:  # of an unfinished line
                return None, None, rest
            raise unknown_command(typed, self.commands, self.prefix, moved=f"lab {typed}" in COMMANDS)
        command = load_command(name)
        if isinstance(command, LazyGroup):
            return own_name, command, rest
        if ctx.resilient_parsing:
            for each in (command, *getattr(command, "commands", {}).values()):
                for param in each.get_params(ctx):
                    param.process_value = lambda ctx, value: value  # as typed: reading it would load pydantic
            return own_name, command, rest
        inner = getattr(command, "commands", {}).get(rest[0]) if rest else None
        if inner is not None:
            return own_name, command, [rest[0], *Speller(f"{name} {rest[0]}", inner).translate(rest[1:])]
        if not hasattr(command, "commands"):
            speller = Speller(name, command, words=WORDS.get(typed, ()), elsewhere=commands_with)
            rest = speller.translate(rest)
            wants_help = rest in (["-h"], ["--help"])
            if wants_help and not speller.all_help and len(command.params) >= _MANY_OPTIONS:
                typer.echo(short_help(name, command))
                raise typer.Exit
            ctx.obj = speller
            os.environ |= speller.sets
            if not wants_help:
                _report(speller.warnings, [] if {"-q", "--quiet"} & set(rest) else speller.settings)
        return own_name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, the import of its module included, with errors turned into exit codes."""
        with environment_kept(), cli_errors():
            try:
                return super().invoke(ctx)
            except _UsageError as error:
                if type(error).__name__ == "NoArgsIsHelpError":  # a group of commands without one: its help
                    raise
                raise _usage_error(error, ctx.obj) from None
            except InputError as error:
                if ctx.obj is not None:
                    error.hint = f"{error.hint} {ctx.obj.origin}".strip()
                raise
            except ValueError as error:  # a frozen configuration rejected a value
                if ctx.obj is None:
                    raise
                hint = f"See moeedge {ctx.obj.name} --help. {ctx.obj.origin}"
                raise InputError(f"{name_options(str(error), ctx.obj.spellings)}.", hint.strip()) from None


class LabGroup(LazyGroup):
    """The commands of `moeedge lab`."""

    prefix = "lab "


@contextmanager
def environment_kept() -> Iterator[None]:
    """Undoes what a command's options set in the environment: a program may run several."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ |= before


def _report(warnings: Sequence[str], settings: Sequence[Setting]) -> None:
    """Says what has no effect, and what the environment sets."""
    if not warnings and not settings:
        return
    from moeedge.ui.console import say, stderr_console

    for sentence in warnings:
        say(stderr_console(), sentence, style="yellow")
    if settings:
        options = ", ".join(f"{setting.spelling} ({setting})" for setting in settings)
        say(stderr_console(), f"From the environment: {options}")


def _usage_error(error: Any, speller: Speller | None) -> InputError:
    """The error for what Typer cannot read, or that is missing."""
    param = getattr(error, "param", None)
    spellings = () if param is None else param.opts
    for setting in () if speller is None else speller.settings:
        if setting.spelling in spellings:
            reason = _reworded(error.message).rstrip(".")
            message = f"{setting} in the environment is not a value for {setting.spelling}: {reason}."
            return InputError(message, f"Correct it, or unset {setting.variable}.")
    words = [] if error.ctx is None else error.ctx.command_path.split()[1:]
    hint = f"See {' '.join(['moeedge', *words])} --help."
    pairs = itertools.pairwise(() if speller is None else speller.arguments)
    values = [(spelling, value) for spelling, value in pairs if spelling in spellings]
    kind = next((kind for word, kind in _KINDS.items() if word in error.message), None)
    if values and kind is not None:
        spelling, value = values[-1]
        return InputError(f"{spelling} takes {kind}, not '{value}'.", hint)
    return InputError(f"{_reworded(error.format_message()).rstrip('.')}.", hint)


def _reworded(message: str) -> str:
    """A message of Typer, and of the library that checks its values, in plain words."""
    for pattern, words in _REWORDED:
        message = re.sub(pattern, words, message)
    return message


def load_command(name: str) -> Any:
    """The complete command of that name, or group of commands."""
    if name == "lab":
        return typer.main.get_command(
            typer.Typer(cls=LabGroup, name=name, help=COMMANDS[name], callback=lambda: None, **_GROUP)
        )
    group, _, module = name.replace("-", "_").rpartition(" ")
    function = "list_models" if name == "list" else module  # "list" would hide Python's
    entry = getattr(import_module(f"moeedge.{'lab.' if group else ''}cli.{_MODULES.get(name, module)}"), function)
    if not isinstance(entry, typer.Typer):
        command_app = typer.Typer(**_SETTINGS)
        command_app.command(name)(entry)
        entry = command_app
    command = typer.main.get_command(entry)
    for inner in (command, *getattr(command, "commands", {}).values()):
        # the terminal breaks the lines of --help; Typer keeps those of the source after the first paragraph
        inner.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in (inner.help or "").split("\n\n"))
        _bare_flags(inner.get_params(typer.Context(inner, help_option_names=_HELP)))
    if not any("-m" in param.opts and param.envvar for param in command.params):  # llama.cpp's are about models
        for param in command.params:
            param.envvar = None
    return command


def short_help(name: str, command: Any) -> str:
    """The most used options of a command, by panel, each in a line of at most 80 characters."""
    lines = [f"Usage: moeedge {name} [OPTIONS]", "", *wrap(command.help.split("\n\n")[0], 80)]
    params = short_params(command)
    for panel in dict.fromkeys(param.rich_help_panel for param in params):
        rows = [param for param in params if param.rich_help_panel == panel]
        lines += [
            "",
            panel,
            *(f"  {_short_spelling(row):<{_SPELLING_WIDTH}}  {_first_words(row.help)}" for row in rows),
        ]
    return "\n".join([*lines, "", f"moeedge {name} --help-all shows all {len(command.params)} options."])


def _short_spelling(param: Any) -> str:
    """The first short and the first long spelling, and the values where there is room for them."""
    short = [word for word in param.opts if not word.startswith("--")][:1]
    long = [word for word in param.opts if word.startswith("--")][:1]
    flags, values = ", ".join(short + long), param.metavar or ""
    if len(f"{flags} {values}") > _SPELLING_WIDTH:
        first, *others = values.split("|")
        values = next((word for word in (first, *others) if word.isupper()), f"{first}|...")
    return f"{flags} {values}".strip()


def _first_words(text: str) -> str:
    """The first sentence of a help text, or its beginning up to a comma where it is too long for a line."""
    for end in (r"\.(?= |$)", ";(?= )", ":(?= )", r",(?= )| (?=\()"):
        places = [match.start() for match in re.finditer(end, text) if match.start() <= _TEXT_WIDTH]
        if places:
            return text[: places[0] if end[0] in "\\:" else places[-1]]
    return f"{text[: _TEXT_WIDTH - 4].rsplit(' ', 1)[0]} ..."


def commands_with(spelling: str) -> list[str]:
    """The commands that run or plan a model and have this option."""
    return [name for name in _MODEL_COMMANDS if spelling in Speller(name, load_command(name)).spellings]


def _bare_flags(params: Sequence[Any]) -> Sequence[Any]:
    """Shows options without a value as such: later versions of Typer put <bool> behind them, as if they took one."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = param.metavar or ""
            if not param.expose_value and param.default is None:  # --help and those of completion
                param.default = False  # which Typer takes as it is; to read None it loads pydantic, for 50 ms
    return params


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moeedge {moeedge.__version__}")
        raise typer.Exit


app = typer.Typer(cls=LazyGroup, name="moeedge", **(_GROUP | {"add_completion": True}))


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run a Mixture-of-Experts model that does not fit your GPU, or your RAM: chat with it, measure it, look inside it.

    First: `moeedge doctor`, then `moeedge chat`. run, ls and other words of ollama and llama.cpp work too.
    """
