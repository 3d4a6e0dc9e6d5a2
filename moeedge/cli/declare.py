"""How options are declared: as lines of a table, derived from one another, as fields of a dataclass."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import wraps
from textwrap import dedent
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from moeedge.cli.completion import completer, completer_of

OUTPUT = "Output"  # panel of --help
# the options of all tables, by their first long spelling as a name: n_predict of "-n, --n-predict N"
OPTIONS: dict[str, Any] = {}


class Output(str, Enum):
    """Formats of results; each command takes some of them."""

    TEXT = "text"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"
    MD = "md"
    SQL = "sql"


def option(
    panel: str,
    spelling: str,
    help: str,
    *,
    also: str = "",
    env: str = "",
    names: Callable[[], Iterable[str]] | None = None,
    **settings: Any,
) -> Any:
    """An option in a panel of --help. spelling: as --help shows it, "-m, --model FILE".

    also: further spellings, which --help does not show, separated by blanks. env: the environment variables, separated
    by blanks, that set it where the command line does not; llama.cpp's names. names: of its values, which a shell
    completes; by default the words of "auto|on|off".
    """
    *flags, last = spelling.split(", ")
    flag, _, metavar = last.partition(" ")
    variables = env.split() or None
    declared = typer.Option(
        *flags,
        flag,
        metavar=metavar or None,
        help=help,
        rich_help_panel=panel,
        envvar=variables,
        show_envvar=False,  # the reference lists them; in --help they would be half of the text
        autocompletion=completer_of(metavar) if names is None else completer(names),
        **settings,
    )
    declared.also = tuple(also.split())
    return declared


def declare(panel: str, table: str, **settings: dict[str, Any]) -> None:
    """Adds the options of a table to OPTIONS, which `option` makes. settings: further arguments, by an option's name.

    A line begins with the spelling and, after two blanks, the help text, which goes on in indented lines. The last of
    them may be "also:", with further spellings and environment variables.
    """
    for entry in re.split(r"^(?=-)", dedent(table), flags=re.MULTILINE)[1:]:
        shown, _, others = entry.partition("\n    also: ")
        spelling, help = " ".join(line.strip() for line in shown.splitlines()).split("  ", 1)
        spellings = [word for word in others.split() if word.startswith("-")]
        variables = [word for word in others.split() if not word.startswith("-")]
        name = re.findall(r"--([a-z-]+)", spelling)[0].replace("-", "_")
        more = settings.get(name, {})
        OPTIONS[name] = option(panel, spelling, help, also=" ".join(spellings), env=" ".join(variables), **more)


def hidden_spellings(command: Any) -> dict[str, str]:
    """The further spellings of a loaded command's options, and the one of each that --help shows first."""
    declared = get_type_hints(command.callback, include_extras=True)
    found: dict[str, str] = {}
    for param in command.params:
        for info in getattr(declared.get(param.name), "__metadata__", ()):
            found |= dict.fromkeys(getattr(info, "also", ()), param.opts[0])
    return found


def derive(declared: Any, **changes: Any) -> Any:
    """A copy of the option of an Annotated type, with some attributes (help, metavar, min) changed."""
    (original,) = declared.__metadata__
    derived = copy(original)
    for name, value in changes.items():
        setattr(derived, name, value)
    return derived


def list_of(declared: Any) -> Any:
    """The same option with a list as its value, of which every element gives a result."""
    (original,) = declared.__metadata__
    return derive(declared, metavar="LIST", help=f"{original.help} Several, separated by commas, are compared.")


def output_option(*formats: Output, help: str, flags: tuple[str, ...] = ("-o", "--output")) -> Any:
    """An option that chooses one of these formats."""
    names = [output.value for output in formats]

    def parse(text: str) -> Output:
        name = "text" if text == "table" else text  # "table": a spelling of earlier releases
        if name not in names:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(names)}.")
        return Output(name)

    return typer.Option(
        *flags,
        parser=parse,
        metavar="|".join(names),
        help=help,
        rich_help_panel=OUTPUT,
        autocompletion=completer(lambda: names),
    )


def flatten(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as Typer needs it: every field of the dataclasses that it takes is an option of its own.

    Where the command has a parameter of a field's name, that is the option, and the field keeps its default. A type
    without an option stands for that of its name in OPTIONS.
    """
    hints = _annotations(command)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    own = inspect.signature(command).parameters

    def fields_of(kind: type) -> list[Any]:
        return [field for field in fields(kind) if field.name not in own]

    for name, parameter in own.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        field_hints = _annotations(groups[name])
        for field in fields_of(groups[name]):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field_hints[field.name]
                )
            )

    @wraps(command)
    def run(**values: Any) -> None:
        objects = {
            name: kind(**{field.name: values.pop(field.name) for field in fields_of(kind)})
            for name, kind in groups.items()
        }
        command(**objects, **values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _annotations(declared: Any) -> dict[str, Any]:
    """The types of parameters or fields, each with its option."""
    return {
        name: kind if get_origin(kind) is Annotated or name not in OPTIONS else Annotated[kind, OPTIONS[name]]
        for name, kind in get_type_hints(declared, include_extras=True).items()
    }
