"""The command line before Typer parses it, which reports an unknown -xyz as -x: every word is looked up first."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeedge.cli.declare import hidden_spellings
from moeedge.cli.foreign import COMMANDS, JSON_OPTIONS, NAME_OPTIONS, OPTIONS, SWITCH, foreign_options
from moeedge.errors import InputError

_HELP = ("-h", "--help")
_ALL_HELP = "--help-all"
_SIMILAR = 0.7  # difflib's ratio from which a spelling is suggested
_VARIABLES = "LLAMA_ARG_"
_OFF_VARIABLES = "LLAMA_ARG_NO_"
_VARIABLE = re.compile(r"[A-Z_]+=")
_VALUE_ATTACHED = re.compile(r"-[A-Za-z][\d.]+[A-Za-z]*")  # -t4, -c8k
HUB_FILE = "LLAMA_ARG_HF_FILE"
_FROM_HUB = re.compile(r"hf:[^:]+")  # that names no file yet
_TAKE_NAME = ("show", "pull", "rm")  # a model, as a word or after -m
# options that may stand without their value, by command: what looks like one, and the value that they have otherwise
_ANY = re.compile(r"[^-].*")
_DEFAULT_VALUES = {"chat": {"--resume": (re.compile(r"list|\d+"), "1")}, "bench": {"--resume": (_ANY, "last")}}
# without a value in earlier llama.cpp, where -1 is auto
_SWITCHED_ON = dict.fromkeys(("-fa", "--flash-attn"), (re.compile(r"-1|[^-].*"), "on"))


@dataclass(frozen=True)
class Setting:
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
        self.sets: dict[str, str] = {}  # variables that translated options set
        self.all_help = False  # whether the help of every option is wanted
        self.warnings: list[str] = []  # a sentence for each option that has no effect
        self.arguments: list[str] = []  # of the last command line, as the command declares them
        self.settings: list[Setting] = []  # of the environment
        self._elsewhere = elsewhere
        self._params = {
            spelling: param
            for param in command.params
            for spelling in (*param.opts, *param.secondary_opts)
            if spelling.startswith("-")
        }
        self._default_values = _SWITCHED_ON | _DEFAULT_VALUES.get(name, {})
        self._hidden = hidden_spellings(command)
        self._takes_words = any(param.param_type_name == "argument" for param in command.params)
        self._words = tuple(words)
        self._runs_model = "-m" in self._params and bool(self._params["-m"].envvar)
        rows = OPTIONS if self._runs_model else NAME_OPTIONS if name in _TAKE_NAME else {}
        if "json" in (getattr(self._params.get("-o"), "metavar", None) or ""):
            rows = JSON_OPTIONS | rows
        self._foreign = foreign_options(rows)

    @property
    def spellings(self) -> set[str]:
        """Those of the command's own options."""
        return {*self._params, *self._hidden}

    def knows(self, word: str) -> bool:
        """Whether the command takes this option, its value attached or not."""
        return self._is_attached(word) or word.partition("=")[0] in self.spellings | self._foreign.keys()

    def _is_attached(self, word: str) -> bool:
        return _VALUE_ATTACHED.fullmatch(word) is not None and _takes_value(self._params.get(word[:2]))

    def translate(self, arguments: Sequence[str]) -> list[str]:
        """The arguments as the command declares them. Raises InputError for what it does not have."""
        rest, translated, plain, hub_file = list(arguments), list[str](), list[str](), ""
        while rest:
            word = rest.pop(0)
            if word == "--":
                plain += rest
                break
            if not word.startswith("-") or word == "-":
                plain.append(word)
                continue
            spelling, equals, value = word.partition("=")
            spelling = self._hidden.get(spelling, spelling)
            if spelling in (*_HELP, _ALL_HELP):
                self.all_help = spelling == _ALL_HELP
                return ["--help"] if self.all_help else [spelling]
            if spelling in self._params:
                translated.append(spelling)
                if not _takes_value(self._params[spelling]):
                    if equals:
                        raise InputError(f"{spelling} takes no value.", f"See moeedge {self.name} --help.")
                elif equals:
                    translated.append(value)
                elif (default := self._default_values.get(spelling)) and not (rest and default[0].fullmatch(rest[0])):
                    translated.append(default[1])
                elif rest:
                    translated.append(rest.pop(0))
                else:
                    raise InputError(f"{spelling} needs a value.", f"See moeedge {self.name} --help.")
            elif self._is_attached(word):
                translated += [word[:2], word[2:]]
            elif spelling in ("-hff", "--hf-file") and self._runs_model and (equals or rest):
                hub_file = value if equals else rest.pop(0)
            elif spelling in self._foreign:
                if equals:
                    rest.insert(0, value)
                rest = [*self._replace(spelling, rest), *rest]
            else:
                raise self._unknown(spelling)
        self._add_foreign_settings(translated, arguments)
        if self._runs_model:
            self._add_hub_file(translated, hub_file)
        self.arguments = [*translated, *self._place(plain)]
        self._add_settings()
        return self.arguments.copy()  # Typer takes it apart

    @property
    def origin(self) -> str:
        """A sentence that names what the environment sets; empty without it."""
        return f"Set in the environment: {', '.join(map(str, self.settings))}." if self.settings else ""

    def _add_settings(self) -> None:
        """Adds what the environment sets of the command's own options, and llama.cpp's values of switches to `sets`.

        Arguments come first. LLAMA_ARG_NO_X switches X off whatever its value, and comes before LLAMA_ARG_X, as in
        llama.cpp.
        """
        typed = {id(self._params[word]) for word in self.arguments if word in self._params}
        for param in dict.fromkeys(self._params.values()):
            is_switch = not _takes_value(param) or {"on", "off"} <= set((param.metavar or "").split("|"))
            variables = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
            for name in (name for name in variables if name.startswith(_VARIABLES)):
                off, value = off_variable(name), os.environ.get(name, "")
                if param.secondary_opts and off in os.environ:
                    setting, word = Setting(off, os.environ[off], param.secondary_opts[0]), "off"
                elif value:
                    setting, word = Setting(name, value, param.opts[0]), SWITCH.get(value.lower(), "")
                else:
                    continue
                if is_switch and word:
                    self.sets[name] = word
                if id(param) not in typed:
                    self.settings.append(setting)
                break

    def _add_hub_file(self, translated: list[str], file: str) -> None:
        """Adds a file, typed or LLAMA_ARG_HF_FILE's, to the repository of -hf, which became -m hf:OWNER/REPO."""
        places = [i + 1 for i, word in enumerate(translated[:-1]) if word == "-m"]
        repository = os.environ.get("LLAMA_ARG_HF_REPO", "") if file or not os.environ.get("LLAMA_ARG_MODEL") else ""
        model = translated[places[-1]] if places else f"hf:{repository.removeprefix('hf:')}"
        match = _FROM_HUB.match(model)
        if file and match is None:
            raise InputError(f"-hff: {self._foreign['-hff'].text}", self._foreign["-hff"].hint)
        if not file and match is not None and match[0] == model and (file := os.environ.get(HUB_FILE, "")):
            self.settings.append(Setting(HUB_FILE, file, "-hff"))
        if file and match is not None:
            place = slice(places[-1] - 1, places[-1] + 1) if places else slice(len(translated), None)
            translated[place] = ["-m", f"{match[0]}:{file}"]

    def _add_foreign_settings(self, translated: list[str], arguments: Sequence[str]) -> None:
        """Puts the environment's values of options that are spelled otherwise here before the others."""
        typed = {word.partition("=")[0] for word in arguments}
        for spellings, row in OPTIONS.items() if self._runs_model else ():
            value = os.environ.get(row.variable)
            names = spellings.split(", ")
            if not value or typed & set(names):
                continue
            setting = Setting(row.variable, value, names[0])
            try:
                words = self._replace(names[0], [value])
            except InputError as error:
                hint = f"Correct it, or unset {row.variable}."
                raise InputError(f"{setting} in the environment: {error.message}", hint) from None
            if words and words[0] in self._params and words[0] not in translated:
                translated[:0] = words
                self.settings.append(setting)

    def _replace(self, spelling: str, following: list[str]) -> list[str]:
        """The words in place of an option of another program; its value is taken from `following`."""
        row = self._foreign[spelling]
        if row.kind == "refused":
            raise InputError(f"{spelling}: {row.text}", row.hint)
        value = ""
        if following and row.has_value and ("" not in row.by_value or following[0] in row.by_value):
            value = following.pop(0)
        elif row.has_value and "" not in row.by_value:
            raise InputError(f"{spelling} needs a value.", f"See moeedge {self.name} --help.")
        if row.kind == "means":
            words = row.words(value)
            if not words and value not in row.by_value:
                choices = ", ".join(row.by_value)
                raise InputError(f'{spelling} takes one of {choices}, not "{value}".', row.hint)
            variables = [word for word in words if _VARIABLE.match(word)]
            self.sets |= dict(word.split("=") for word in variables)
            return [word for word in words if word not in variables]
        if row.kind == "always" and value not in row.values and row.values:
            raise InputError(f"{spelling} is always {row.values[0]}: {row.text}.", "Leave it out.")
        warning = f"{f'{spelling} {value}'.strip()} has no effect: {row.text}."
        if row.kind == "ignored" and value not in row.values and warning not in self.warnings:
            self.warnings.append(warning)
        return []

    def _place(self, plain: list[str]) -> list[str]:
        """Words without a dash, as arguments or as values of options."""
        if not plain or self._takes_words:
            return ["--", *plain] if any(word.startswith("-") for word in plain) else plain
        if not self._words:
            hint = f"For a model write -m {plain[0]}" if "-m" in self._params else f"See moeedge {self.name} --help"
            also = f", for a question -p '{plain[0]}'." if self.name == "chat" else "."
            raise InputError(f"moeedge {self.name} takes options only, not the word '{plain[0]}'.", hint + also)
        n = len(self._words) - 1
        values = [*plain[:n], " ".join(plain[n:])] if plain[n:] else plain
        return [text for pair in zip(self._words, values, strict=False) for text in pair]

    def _unknown(self, spelling: str) -> InputError:
        message = f"moeedge {self.name} has no option {spelling}"
        others = self._elsewhere(spelling)
        if others:
            names = ", ".join(others[:-1]) + f"{' and ' if others[1:] else ''}{others[-1]}"
            return InputError(f"{message}; {names} {'have' if others[1:] else 'has'} it.")
        similar = [
            name for name in difflib.get_close_matches(spelling, self.spellings, n=3, cutoff=_SIMILAR) if len(name) > 2
        ]
        if not similar and spelling[1] != "-" and _takes_value(self._params.get(spelling[:2])):
            similar = [f"{spelling[:2]} {spelling[2:]}"]
        similar = [name for name in similar if name.startswith(spelling)] or similar
        hint = f"Did you mean {' or '.join(similar)}?" if similar else f"See moeedge {self.name} --help."
        return InputError(f"{message}.", hint)


def unknown_command(name: str, commands: Mapping[str, object], group: str = "", *, moved: bool = False) -> InputError:
    """The error for a command that `group` ("lab " or none) does not have; moved: it is one of the lab's."""
    if moved:
        return InputError(f"{name} is a command of the lab.", f"Write moeedge lab {name}.")
    if name in COMMANDS and not group:
        return InputError(COMMANDS[name].text, COMMANDS[name].hint)
    similar = difflib.get_close_matches(name, commands)
    hint = f"Did you mean {group}{' or '.join(similar)}?" if similar else f"moeedge {group}--help lists the commands."
    return InputError(f"moeedge {group}has no command {name}.", hint)


def name_options(message: str, spellings: set[str]) -> str:
    """Names the option in place of the field in a sentence, which gets a capital letter.

    "n_threads (-t) must be ..." becomes "-t must be ...", "top_k must be ..." "--top-k must be ...".
    """
    if match := re.match(r"(?:the )?[\w ]+ \((-[\w-]+)\) (?=must )", message):
        return f"{match[1]} {message[match.end() :]}"
    field, _, rest = message.partition(" ")
    option = f"--{field.replace('_', '-')}"
    return f"{option} {rest}" if option in spellings else message[:1].upper() + message[1:]


def off_variable(name: str) -> str:
    """The variable that switches off what `name` switches on: LLAMA_ARG_NO_MMAP for LLAMA_ARG_MMAP."""
    return name.replace(_VARIABLES, _OFF_VARIABLES, 1)


def _takes_value(param: Any) -> bool:
    return param is not None and not getattr(param, "is_flag", False) and not getattr(param, "count", False)
