"""What was typed, before Typer parses it: further spellings, words of other programs, options that do not exist.

Typer reports an unknown -xyz as -x. Here every argument is looked up as an entire word first.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeedge.cli.declare import hidden_spellings
from moeedge.cli.foreign import COMMANDS, OPTIONS, SWITCH, Already, Ignored, Instead, Refused, Sets, foreign_options
from moeedge.errors import InputError

_HELP = ("-h", "--help")
_SIMILAR = 0.7  # difflib's ratio from which a spelling is suggested
_VARIABLES = "LLAMA_ARG_"
_OFF_VARIABLES = "LLAMA_ARG_NO_"
_VALUE_ATTACHED = re.compile(r"-[A-Za-z][\d.]+[A-Za-z]*")  # -t4, -c8k
HUB_FILE = "LLAMA_ARG_HF_FILE"
_FROM_HUB = re.compile(r"hf:[^:]+")  # that names no file yet
# options that may stand without their value, by command: what looks like one, and the value that they have otherwise
_DEFAULT_VALUES = {
    ("chat", "--resume"): (re.compile(r"list|\d+"), "1"),
    ("bench", "--resume"): (re.compile(r"[^-].*"), "last"),
}


@dataclass(frozen=True)
class Setting:
    """An option that the environment sets."""

    variable: str
    value: str
    spelling: str

    def __str__(self) -> str:
        return f"{self.variable}={self.value}"


class Speller:
    """The spellings that one loaded command understands.

    words: the options that words without a dash stand for, in their order; of the last one all that are left.
    elsewhere: names the commands that have an option.
    """

    def __init__(
        self,
        name: str,
        command: Any,
        *,
        words: Sequence[str] = (),
        elsewhere: Callable[[str], list[str]] = lambda spelling: [],
    ) -> None:
        self.name = name
        self.sets: dict[str, str] = {}  # of the environment, by what was translated
        self.warnings: list[str] = []  # a sentence for each option that has no effect
        self._elsewhere = elsewhere
        self._params = {
            spelling: param
            for param in command.params
            for spelling in (*param.opts, *param.secondary_opts)
            if spelling.startswith("-")
        }
        self._hidden = hidden_spellings(command)
        self._takes_words = any(param.param_type_name == "argument" for param in command.params)
        self._words = tuple(words)
        self._foreign_settings: list[Setting] = []
        runs_model = "-m" in self._params and self._params["-m"].envvar
        self._foreign = foreign_options() if runs_model else {}

    @property
    def spellings(self) -> set[str]:
        """Those of the command's own options."""
        return {*self._params, *self._hidden}

    def translate(self, arguments: Sequence[str]) -> list[str]:
        """The arguments as the command declares them. Raises InputError for what it does not have."""
        given = list(arguments)
        translated: list[str] = []
        plain: list[str] = []
        hub_file = ""
        while given:
            word = given.pop(0)
            if word == "--":
                plain += given
                break
            if not word.startswith("-") or word == "-":
                plain.append(word)
                continue
            spelling, equals, value = word.partition("=")
            spelling = self._hidden.get(spelling, spelling)
            if spelling in _HELP:
                return [spelling]
            if spelling in self._params:
                translated.append(spelling)
                if not _takes_value(self._params[spelling]):
                    if equals:
                        raise InputError(f"{spelling} takes no value.", f"See moeedge {self.name} --help.")
                elif equals:
                    translated.append(value)
                elif (default := _DEFAULT_VALUES.get((self.name, spelling))) and not _may_be_value(default[0], given):
                    translated.append(default[1])
                elif given:
                    translated.append(given.pop(0))
                else:
                    raise InputError(f"{spelling} needs a value.", f"See moeedge {self.name} --help.")
            elif _VALUE_ATTACHED.fullmatch(word) and _takes_value(self._params.get(word[:2])):
                translated += [word[:2], word[2:]]
            elif spelling in ("-hff", "--hf-file") and self._foreign and (equals or given):
                hub_file = value if equals else given.pop(0)
            elif spelling in self._foreign:
                if equals:
                    given.insert(0, value)
                given = [*self._replace(spelling, given), *given]
            else:
                raise self._unknown(spelling)
        self._add_foreign_settings(translated, arguments)
        self._read_switches()
        if hub_file:
            _add_file(translated, hub_file, self._foreign["-hff"])
        elif self._foreign:
            self._add_hub_file(translated)
        return [*translated, *self._place(plain)]

    def settings(self, arguments: Sequence[str]) -> list[Setting]:
        """What the environment sets; `arguments`, which are translated, come first."""
        given = {id(self._params[word]) for word in arguments if word in self._params}
        found = list(self._foreign_settings)
        for param in dict.fromkeys(self._params.values()):
            if id(param) in given:
                continue
            variables = _variables_of(param)
            off = next((off_variable(name) for name in variables if _is_switched_off(param, name)), None)
            if off is not None:
                found.append(Setting(off, os.environ[off], param.secondary_opts[0]))
                continue
            variable = next((name for name in variables if os.environ.get(name)), None)
            if variable is not None and variable.startswith(_VARIABLES):
                found.append(Setting(variable, os.environ[variable], param.opts[0]))
        return found

    def _read_switches(self) -> None:
        """Writes llama.cpp's values of switches in the environment as Typer reads them.

        LLAMA_ARG_NO_X switches X off whatever its value, and comes before LLAMA_ARG_X, as in llama.cpp.
        """
        for param in dict.fromkeys(self._params.values()):
            is_flag = not _takes_value(param)
            if not is_flag and not {"on", "off"} <= set((param.metavar or "").split("|")):
                continue
            for name in _variables_of(param):
                word = SWITCH.get(os.environ.get(name, "").lower())
                if _is_switched_off(param, name):
                    self.sets[name] = "off"
                elif word is not None:
                    self.sets[name] = word

    def _add_hub_file(self, translated: list[str]) -> None:
        """Adds LLAMA_ARG_HF_FILE to a repository that is named without a file; another model comes before it."""
        file = os.environ.get(HUB_FILE)
        given = [value for word, value in itertools.pairwise(translated) if word == "-m"]
        repository = os.environ.get("LLAMA_ARG_HF_REPO", "") if not os.environ.get("LLAMA_ARG_MODEL") else ""
        model = given[-1] if given else f"hf:{repository.removeprefix('hf:')}"
        if file and _FROM_HUB.fullmatch(model):
            _add_file(translated, file, self._foreign["-hff"])
            self._foreign_settings.append(Setting(HUB_FILE, file, "-hff"))

    def _add_foreign_settings(self, translated: list[str], arguments: Sequence[str]) -> None:
        """Puts the environment's values of options that are spelled otherwise here before the others."""
        given = {word.partition("=")[0] for word in arguments}
        for spellings, row in OPTIONS.items() if self._foreign else ():
            value = os.environ.get(row.env) if isinstance(row, Instead) and row.env else None
            names = spellings.split(", ")
            if not isinstance(row, Instead) or not value or given & set(names):
                continue
            spelling = names[0]
            setting = Setting(row.env, value, spelling)
            try:
                words = self._replace(spelling, [value])
            except InputError as error:
                hint = f"Correct it, or unset {setting.variable}."
                raise InputError(f"{setting} in the environment: {error.message}", hint) from None
            if words and words[0] in self._params and words[0] not in translated:
                translated[:0] = words
                self._foreign_settings.append(setting)

    def _replace(self, spelling: str, following: list[str]) -> list[str]:
        """What is written in place of an option of another program; its value is taken from `following`."""
        row = self._foreign[spelling]
        if isinstance(row, Refused):
            raise InputError(f"{spelling}: {row.message}", row.hint)
        if isinstance(row, Sets):
            value = following[0] if following and following[0] in row.by_value else row.default
            if value and following and following[0] == value:
                following.pop(0)
            variable, content = row.by_value[value]
            if variable:
                self.sets[variable] = content
            return []
        if isinstance(row, Already) and not row.values:
            return []
        if isinstance(row, Ignored) and not row.has_value:
            self._warn(f"{spelling} has no effect: {row.reason}.")
            return []
        needs_value = isinstance(row, Already | Ignored) or row.by_value or "{}" in row.words
        if needs_value and not following:
            raise InputError(f"{spelling} needs a value.", f"See moeedge {self.name} --help.")
        value = following.pop(0) if needs_value else ""
        if isinstance(row, Ignored):
            if value not in row.same:
                self._warn(f"{spelling} {value} has no effect: {row.reason}.")
            return []
        if isinstance(row, Already):
            if value in row.values:
                return []
            raise InputError(f"{spelling} is always {row.values[0]}: {row.meaning}.", "Leave it out.")
        found = row.arguments(value)
        if found is None:
            choices = ", ".join(row.by_value)
            raise InputError(f'{spelling} takes one of {choices}, not "{value}".', row.hint)
        return found

    def _warn(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def _place(self, plain: list[str]) -> list[str]:
        """Words without a dash, as arguments or as values of options."""
        if not plain or self._takes_words:
            return ["--", *plain] if any(word.startswith("-") for word in plain) else plain
        if not self._words:
            hint = f"For a model write -m {plain[0]}" if "-m" in self._params else f"See moeedge {self.name} --help"
            also = f", for a question -p '{plain[0]}'." if self.name == "chat" else "."
            raise InputError(f"moeedge {self.name} takes options only, not the word '{plain[0]}'.", hint + also)
        placed = []
        for option, word in zip(self._words[:-1], plain, strict=False):
            placed += [option, word]
        rest = plain[len(self._words) - 1 :]
        return [*placed, self._words[-1], " ".join(rest)] if rest else placed

    def _unknown(self, spelling: str) -> InputError:
        """The error for an option that nothing has, or that another command has."""
        message = f"moeedge {self.name} has no option {spelling}"
        others = self._elsewhere(spelling)
        if others:
            *first, last = others
            names = f"{', '.join(first)} and {last}" if first else last
            return InputError(f"{message}; {names} {'have' if first else 'has'} it.")
        similar = [
            name for name in difflib.get_close_matches(spelling, self.spellings, n=3, cutoff=_SIMILAR) if len(name) > 2
        ]
        if not similar and spelling[1] != "-" and _takes_value(self._params.get(spelling[:2])):
            similar = [f"{spelling[:2]} {spelling[2:]}"]
        hint = f"Did you mean {' or '.join(similar)}?" if similar else f"See moeedge {self.name} --help."
        return InputError(f"{message}.", hint)


def unknown_command(name: str, known: Mapping[str, object], group: str = "", *, moved: bool = False) -> InputError:
    """The error for a command that `group` ("lab " or none) does not have; moved: it is one of the lab's."""
    if moved:
        return InputError(f"{name} is a command of the lab.", f"Write moeedge lab {name}.")
    if name in COMMANDS and not group:
        return InputError(COMMANDS[name].message, COMMANDS[name].hint)
    similar = difflib.get_close_matches(name, known)
    hint = f"Did you mean {group}{' or '.join(similar)}?" if similar else f"moeedge {group}--help lists the commands."
    return InputError(f"moeedge {group}has no command {name}.", hint)


def name_options(message: str, spellings: set[str]) -> str:
    """A sentence about a field of a configuration, with the option in place of the field, and a capital letter.

    "n_threads (-t) must be ..." becomes "-t must be ...", "top_k must be ..." "--top-k must be ...".
    """
    named = re.match(r"(?:the )?[\w ]+ \((-[\w-]+)\) (?=must )", message)
    if named is not None:
        return f"{named[1]} {message[named.end() :]}"
    field, _, rest = message.partition(" ")
    option = f"--{field.replace('_', '-')}"
    if option in spellings:
        return f"{option} {rest}"
    return message[:1].upper() + message[1:]


def _may_be_value(values: re.Pattern[str], given: Sequence[str]) -> bool:
    return bool(given) and values.fullmatch(given[0]) is not None


def _variables_of(param: Any) -> list[str]:
    return [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())


def off_variable(name: str) -> str:
    """The variable that switches off what `name` switches on: LLAMA_ARG_NO_MMAP for LLAMA_ARG_MMAP."""
    return name.replace(_VARIABLES, _OFF_VARIABLES, 1)


def _is_switched_off(param: Any, name: str) -> bool:
    """Whether the environment has LLAMA_ARG_NO_X of a flag that has an opposite."""
    return bool(param.secondary_opts) and name.startswith(_VARIABLES) and off_variable(name) in os.environ


def _takes_value(param: Any) -> bool:
    return param is not None and not getattr(param, "is_flag", False) and not getattr(param, "count", False)


def _add_file(translated: list[str], file: str, error: Any) -> None:
    """Adds the file to the repository of -hf, which became -m hf:OWNER/REPO."""
    places = [i + 1 for i, word in enumerate(translated[:-1]) if word == "-m"]
    model = translated[places[-1]] if places else os.environ.get("LLAMA_ARG_HF_REPO", "")
    if not places and model:
        translated += ["-m", f"hf:{model.removeprefix('hf:').partition(':')[0]}:{file}"]
    elif _FROM_HUB.match(model):
        translated[places[-1]] = f"hf:{model.removeprefix('hf:').partition(':')[0]}:{file}"
    else:
        raise InputError(f"-hff: {error.message}", error.hint)
