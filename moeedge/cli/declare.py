"""How options are declared: once, as lines of a table, by the parameter or field that they set."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import partial, wraps
from operator import not_
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from moeedge.cli.completion import completer, completer_of
from moeedge.errors import InputError

# the options of all tables, by their long spellings as names (n_predict of "-n, --n-predict N") and by the fields that
# they set; those of one command are "COMMAND NAME"
OPTIONS: dict[str, Any] = {}
# what /set changes in a running chat: "NAME ALIASES: what it does", and the names of the option
SETTINGS: dict[str, list[str]] = {}


class Output(str, Enum):
    """Formats of results; each command takes some of them."""

    TEXT = "text"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"
    MD = "md"
    SQL = "sql"


def declare(
    table: str, commands: str = "", read: Mapping[Callable[..., Any], str] | None = None, **settings: Any
) -> None:
    """Adds the options of a table to OPTIONS. settings: `_derived`'s further arguments, by the first long spelling.

    read: what makes values from the text and from `option`, its first spelling, each with the options that it reads.

    A line begins with the spelling as --help shows it and, after two blanks, the help text, which goes on in indented
    lines. The last of them may be "also:", with what --help does not show: further spellings, the environment variables
    that set the option where the command line does not (llama.cpp's names), and fields of configurations that it sets,
    --no-X the field X to off.
    After it "set:" makes it a setting of a running chat, see moeedge.ui.chat.settings.add.
    "* " before the spelling: the short help shows the option. "[NAME]" begins a panel of --help.

    commands: names of functions. Their table has options of their own, and other values and texts for options of the
    common tables ("..." stands for the common text); there a panel is given where it differs.
    """
    for panel, shown, help, further_lines in entries(table):
        others = further_lines.get("also", "")
        spelling = shown.removeprefix("* ")
        long = [_name(word) for word in re.findall(r"(?<!/)--[a-z-]+", f"{spelling} {others}")]
        variables = [word for word in others.split() if word.isupper()]
        names = [*long, *(word for word in others.split() if word.islower() and not word.startswith("-"))]
        further: dict[str, Any] = dict(settings.get(names[0], {}))
        for reader, options in (read or {}).items():
            if names[0] in options.split():
                further["read"] = reader
        common = OPTIONS.get(names[0]) if commands else None
        if common is not None and any(_name(flag) == names[0] for flag in common.flags):
            declared = _derived(common, spelling, help, panel, **further)
            names = common.names
        else:
            *flags, last = spelling.split(", ")
            flags.append(last.partition(" ")[0])
            envvar = further.pop("envvar", variables or None)
            # the reference lists variables; in --help they would be half of the text
            option: Any = typer.Option(*flags, show_envvar=False, envvar=envvar)
            option.flags, option.short = tuple(flags), False
            option.also = tuple(word for word in others.split() if word.startswith("-"))
            declared = _derived(option, last, help, panel, **further)
        declared.short = declared.short or shown != spelling
        if names[0].removeprefix("no_") in names[1:]:  # --no-X is the field X, and off
            declared.convert, declared.kind = not_, bool
        declared.names = names
        if "set" in further_lines:
            short = [word.lstrip("-") for word in declared.flags if not word.startswith("--")]
            SETTINGS[further_lines["set"]] = [*names, *short]
        for command in commands.split() or [""]:
            OPTIONS.update((f"{command} {name}".strip(), declared) for name in names)


def entries(table: str) -> Iterator[tuple[str, str, str, dict[str, str]]]:
    """The lines of a table: the heading above, what stands before two blanks, the text, the rest by its first word."""
    heading = ""
    for entry in re.split(r"^(?=\S)", dedent(table), flags=re.MULTILINE)[1:]:
        if entry.startswith("["):
            heading = entry.strip()[1:-1]
            continue
        shown, *others = re.split(r"\n    (also|set): ", entry.rstrip())
        first, text = " ".join(line.strip() for line in shown.splitlines()).split("  ", 1)
        yield heading, first, text, dict(zip(others[::2], others[1::2], strict=True))


def _name(spelling: str) -> str:
    return spelling[2:].replace("-", "_")


def _derived(
    common: Any,
    spelling: str,
    help: str,
    panel: str,
    *,
    names: Callable[[], Iterable[str]] | None = None,
    convert: Callable[[Any], Any] | None = None,
    read: Callable[..., Any] | None = None,
    kind: Any = None,
    least: float | None = None,
    most: float | None = None,
    **attributes: Any,
) -> Any:
    """A copy of an option with another text and value, and attributes of Typer's.

    names: of its values, which a shell completes; by default the words of "auto|on|off". convert: makes the value from
    what was typed, of the type `kind`. read: the same for a text, with the option's first spelling for errors. least,
    most: of a number.
    """
    declared = copy(common)
    declared.help = help.replace("...", common.help, 1) if help.startswith("...") else help
    declared.rich_help_panel = panel or common.rich_help_panel
    metavar = spelling.partition(" ")[2] or None
    if metavar != common.metavar:
        declared.metavar, declared.parser = metavar, None
        declared.autocompletion = common.autocompletion or completer_of(metavar or "")
        if "--output" in declared.flags:
            declared.parser = output_parser(metavar or "")
    if names is not None:
        declared.autocompletion = completer(names)
    if read is not None:
        convert, kind = partial(read, option=declared.flags[0]), str
    if metavar != common.metavar or convert is not None:
        declared.convert, declared.kind = convert, kind
    if least is not None or most is not None:
        declared.range = (least, most)
    for name, value in attributes.items():
        setattr(declared, name, value)
    return declared


def output_parser(formats: str) -> Callable[[str], Output]:
    """Reads one of the formats "text|json"."""
    names = formats.split("|")

    def parse(text: str) -> Output:
        name = "text" if text == "table" else text  # "table": a spelling of earlier releases
        if name not in names:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(names)}.")
        return Output(name)

    return parse


def hidden_spellings(command: Any) -> dict[str, str]:
    """The further spellings of a loaded command's options, and the one of each that --help shows first."""
    return {spelling: param.opts[0] for param, info in _declarations(command) for spelling in getattr(info, "also", ())}


def short_params(command: Any) -> list[Any]:
    """The parameters of a loaded command that its short help shows, as click has them; none: it has no short help."""
    return [param for param, info in _declarations(command) if getattr(info, "short", False)]


def _declarations(command: Any) -> Iterator[tuple[Any, Any]]:
    """The parameters of a loaded command, each with its declaration."""
    declared = get_type_hints(command.callback, include_extras=True)
    for param in command.params:
        yield from ((param, info) for info in getattr(declared.get(param.name), "__metadata__", ()))


def flatten(command: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """`command` as Typer needs it: every field of the dataclasses that it takes is an option of its own.

    A command with a single dataclass `options` has the fields of that as parameters. A parameter or field without an
    option stands for that of its name in OPTIONS; a field that has none there keeps its default, and so does one of
    which the command has a parameter. Fields that are dataclasses are groups themselves. defaults: of fields, where
    those of the command differ.
    """
    signature, own = inspect.signature(command), get_type_hints(command, include_extras=True)
    own_defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    del own["return"]
    call: Callable[..., Any] = command
    if [*own] == ["options"]:
        whole = own["options"]
        own = get_type_hints(whole, include_extras=True)
        own_defaults = {field.name: _default(field) for field in fields(whole)}

        def call(**values: Any) -> None:
            command(whole(**values))

    parameters: list[inspect.Parameter] = []

    def option_of(name: str, hint: Any) -> Any:
        if get_origin(hint) is Annotated:
            return hint.__metadata__[0]
        return OPTIONS.get(f"{command.__name__} {name}", OPTIONS.get(name))

    def add(name: str, hint: Any, default: Any) -> None:
        option = option_of(name, hint)
        kind = getattr(option, "kind", None)
        if kind is str:
            default = ",".join(map(str, default)) or None if isinstance(default, tuple) else default
            hint = str | None if default is None else str
        elif kind is not None:
            hint, default = kind, False if kind is bool else []
        if option is not None and get_origin(hint) is not Annotated:
            hint = Annotated[hint, option]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))

    def add_fields(group: Any) -> None:
        group_hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            hint = group_hints[field.name]
            if is_dataclass(hint):
                add_fields(hint)
            elif (option := option_of(field.name, hint)) is not None and field.name not in own:
                default = defaults.get(field.name, _default(field))
                if "Default: " in option.help and default is not None and field.name not in defaults:
                    hint, default = hint | None, None  # the text says it; see `made`
                add(field.name, hint, default)

    for name, hint in own.items():
        if is_dataclass(hint):
            add_fields(hint)
        else:
            add(name, hint, own_defaults[name])

    def made(group: Any, values: dict[str, Any]) -> Any:
        arguments = {}
        for name, kind in get_type_hints(group).items():
            if is_dataclass(kind):
                arguments[name] = made(kind, values)
            elif name not in own and values.get(name) is not None:
                arguments[name] = values[name]
        return group(**arguments)

    @wraps(command)
    def run(**values: Any) -> None:
        for parameter in parameters:
            for option in getattr(parameter.annotation, "__metadata__", ()):
                values[parameter.name] = _value(option, values[parameter.name])
        if sum(value == Path("-") for value in values.values()) > 1:
            raise InputError("Only one option can read standard input (-).", "Give files for the others.")
        call(**{name: made(hint, values) if is_dataclass(hint) else values[name] for name, hint in own.items()})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _value(option: Any, value: Any) -> Any:
    """The value as the command takes it. Raises ValueError for numbers out of range, and the errors of `convert`."""
    least, most = getattr(option, "range", (None, None))
    if value is not None and ((least is not None and not value >= least) or (most is not None and not value <= most)):
        words = getattr(option, "words", f"from {least} to {most}" if most is not None else f"{least} or more")
        raise ValueError(f"{option.flags[-1]} must be {words}, not {value}")
    convert = getattr(option, "convert", None)
    return value if convert is None or value is None else convert(value)
