"""The options of `moeedge chat`: sampling, grammars, templates and views. Defaults are llama.cpp's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from moeedge.cli.common import text_of, unescaped, valid_text
from moeedge.cli.declare import SETTINGS
from moeedge.cli.engine_options import BudgetOptions, LlamaOptions, PlacementOptions
from moeedge.cli.options import Output, declare, output_parser
from moeedge.engine.types import DEFAULT_SAMPLERS, SAMPLERS, SamplingConfig, seed_or_random
from moeedge.errors import InputError
from moeedge.llama.json_schema import ANY_OBJECT, schema_grammar
from moeedge.llama.reasoning import THINK_WORDS, TemplateChoice
from moeedge.schemas import read_json
from moeedge.ui.chat import settings
from moeedge.ui.chat.settings import Look

_LETTERS = {letter: name for name, letter in SAMPLERS.items()}
_LOGIT_BIAS = re.compile(r"(\d+)([+-])(inf|\d*\.?\d+(?:e[+-]?\d+)?)", re.IGNORECASE)
_ALWAYS = 1e30  # added to a logit; JSON has no infinity
_SAMPLER_NAMES = ", ".join(SAMPLERS)


def _grammar_text(text: str) -> str:
    """A grammar; an empty one would be none. Raises InputError."""
    if not text.strip():
        raise InputError("The grammar is empty.", "It needs at least a rule for root.")
    return text


def _samplers(text: str) -> tuple[str, ...]:
    """Names of samplers, which may be written with dashes."""
    names = {name.strip(): name.strip().replace("-", "_") for name in re.split("[;,]", text) if name.strip()}
    for typed, name in names.items():
        if name in ("mirostat", "adaptive_p"):
            raise InputError(f"moeedge does not have the sampler {name}.", "Use top_p, min_p or typ_p.")
        if name not in SAMPLERS:
            raise InputError(f"Unknown sampler {typed!r}.", f"Choose from: {_SAMPLER_NAMES}.")
    return tuple(names[name.strip()] for name in re.split("[;,]", text) if name.strip())


def _samplers_by_letter(text: str) -> tuple[str, ...]:
    unknown = [letter for letter in text if letter not in _LETTERS]
    if unknown:
        letters = ", ".join(f"{letter} {name}" for letter, name in _LETTERS.items())
        raise InputError(f"--sampling-seq has no sampler {unknown[0]!r}.", f"Choose from: {letters}.")
    return tuple(_LETTERS[letter] for letter in text)


def _texts(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(valid_text, texts))


declare(
    f"""
    [Sampling]
    * --top-k K  Sample from the k most likely tokens; 0: all.
        also: LLAMA_ARG_TOP_K
        set: top_k: draw from so many of the likeliest tokens; 0: all
    * --top-p P  Sample from the most likely tokens, up to this cumulative probability.
        also: LLAMA_ARG_TOP_P
        set: top_p: draw from likeliest tokens with this probability
    --min-p P  Drop tokens less likely than this fraction of the most likely one.
        also: LLAMA_ARG_MIN_P
        set: min_p: leave out tokens below this share of the likeliest
    --repeat-penalty X  Make repeated tokens less likely; 1: off.
        also: LLAMA_ARG_REPEAT_PENALTY
        set: repeat_penalty: makes repeated tokens less likely; 1: off
    --repeat-last-n N  Number of last tokens that the penalty considers.
        set: repeat_last_n: tokens that count as repeated; -1: all
    --presence-penalty X  Make the tokens of the last ones less likely, by X (of a logit); 0: off.
        also: LLAMA_ARG_PRESENCE_PENALTY
        set: presence_penalty: makes tokens less likely that have occurred
    --frequency-penalty X  The same, once for each time that a token occurs there; 0: off.
        also: LLAMA_ARG_FREQUENCY_PENALTY
        set: frequency_penalty: the same, once per occurrence
    --typical P  Sample from the tokens whose probability is nearest to the average one, up to this cumulative
        probability; 1: off.
        also: --typical-p
        set: typical_p: locally typical sampling; 1: off
    --top-nsigma X  Keep tokens within X standard deviations of the largest logit; -1: off.
        also: --top-n-sigma
        set: top_n_sigma: draw from tokens near the likeliest; -1: off
    --xtc-probability P  Chance to drop all tokens above --xtc-threshold but the least likely of them; 0: off.
        set: xtc_probability: chance to leave the likeliest tokens out
    --xtc-threshold P  Probability from which XTC drops.
    --dynatemp-range X  Let the temperature follow how uncertain the model is, by at most X up or down; 0: off.
    --dynatemp-exp X  Exponent of that uncertainty for the temperature.
        also: dynatemp_exponent
    --dry-multiplier X  Make tokens less likely that continue a repeated passage (DRY); 0: off.
        set: dry_multiplier: penalty of repeated sequences; 0: off
    --dry-base X  DRY: growth of the penalty per repeated token.
    --dry-allowed-length N  DRY: repeated tokens without a penalty.
    --dry-penalty-last-n N  DRY: number of last tokens that are searched; 0: off.
    --dry-sequence-breaker TEXT  DRY: a text that ends a passage; may be given several times, none: no text does.
        Default: line break, colon, quotation mark and asterisk.
        also: dry_sequence_breakers
    --samplers LIST  Samplers in this order, separated by ; or ,: {_SAMPLER_NAMES}. Default: all but infill.
        set: samplers: the order of these
    --sampling-seq LETTERS  The same in letters. Default: {"".join(SAMPLERS[name] for name in DEFAULT_SAMPLERS)}.
        also: --sampler-seq
    -l, --logit-bias ID+X  Add X to the logit of a token, or subtract it (ID-X; ID-inf: never). May be given several
        times.
    --ignore-eos  Never draw a token that ends the answer; -n N ends it.
    -r, --reverse-prompt TEXT  End the answer before TEXT. May be given several times.
        also: --stop
    --grammar GBNF  Answers follow this grammar, in llama.cpp's GBNF; it starts at root. Default: none.
        set: grammar: a GBNF file, or a JSON schema, that answers follow
    --grammar-file FILE  Read the grammar from a text file.
    -j, --json-schema SCHEMA  Answers are JSON that follows this schema; '{{"type": "object"}}' is any object.
    -jf, --json-schema-file FILE  Read the JSON schema from a file.
    --format json  Answers are JSON objects, as ollama's --format json.
    [Workload]
    --chat-template NAME|JINJA  Chat template in place of the model's: one of llama.cpp's by name (chatml, llama3,
        ...), or Jinja text.
        also: LLAMA_ARG_CHAT_TEMPLATE
    --chat-template-file FILE  Read the chat template, in Jinja, from a file.
        also: LLAMA_ARG_CHAT_TEMPLATE_FILE
    --chat-template-kwargs JSON  Variables for the chat template, as a JSON object: '{{"enable_thinking": false}}'.
        also: LLAMA_ARG_CHAT_TEMPLATE_KWARGS
    * --think auto|on|off|low|medium|high  Thinking before the answer, of models that can switch it: on, off or a
        level; auto: as the model's template has it.
        also: -rea --reasoning LLAMA_ARG_REASONING
        set: think: whether the model is told to think first
    --reasoning-effort LEVEL  Thinking level, of models that have levels: low, medium, high, ...; default: as the
        model's template has it.
        also: LLAMA_ARG_REASONING_EFFORT
    """,
    dry_sequence_breaker={
        "kind": list[str],
        "convert": lambda texts: tuple(text for text in _texts(texts) if text != "none") if texts else None,
    },
    grammar={"convert": _grammar_text},
    samplers={"kind": str, "convert": _samplers},
    sampling_seq={"kind": str, "convert": _samplers_by_letter},
    logit_bias={"kind": list[str], "convert": lambda texts: tuple(map(_logit_bias, texts))},
    reverse_prompt={"kind": list[str], "convert": _texts},
)


declare(
    r"""
    --seed N  ...
    [Workload]
    * -sys, --system-prompt TEXT  System prompt.
        also: --system
    -sysf, --system-prompt-file FILE  Read the system prompt from a text file.
    -e, --escape/--no-escape  Turn \n, \t, \", \', \\ and \xHH in prompt, system prompt, -r and --dry-sequence-breaker
        into the characters that they stand for. Off by default (llama.cpp: on).
    -st, --single-turn  Exit after one answer.
    -i, --interactive  Chat on at the terminal after the answer to -p or -f.
    * --resume [N|list]  Go on with a chat that ended unexpectedly, the newest or number N, with its own system prompt,
        sampling options and -n; list: show them.
    --no-autosave  Do not save this chat to disk. By default it is saved in the cache folder, for --resume.
    [Hardware]
    --context-shift/--no-context-shift  Drop the older half when the context is full, instead of stopping.
        also: LLAMA_ARG_CONTEXT_SHIFT
        set: context_shift: drop the older half when the context is full
    [Expert placement]
    --keep-cache  Compute with the expert cache also while steps take longer with it, instead of trying it again later.
    [Output]
    --stats json  At the end, print all counters of expert placement on standard error.
    -q, --quiet  Show answers, warnings and errors only: no greeting, no panel, no figures.
        set: stats: figures that are shown: line, full or off
    --plain  Show the text of answers as the model writes it: no Markdown, no panel, no colour.
        set: markdown: headings, bold text and code are shown as such
    --show-thinking/--hide-thinking  What a model thinks before it answers: in full, or as a line with its length.
        Default: as a line on a terminal, in full elsewhere.
        set: show_thinking thinking: show what a model thinks: on, off (one line), auto
    """,
    "chat",
    seed={"convert": seed_or_random},
    stats={"parser": output_parser("json")},
)


for line, names in SETTINGS.items():
    settings.add(line, names)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is drawn, and what answers follow."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sampling_seq: tuple[str, ...] | None = None
    grammar_file: Path | None = None
    json_schema: str | None = None
    json_schema_file: Path | None = None
    format: str | None = None

    def config(self, *, escape: bool = False) -> tuple[SamplingConfig, list[str]]:
        r"""The configuration, with \n and the like replaced for `escape`, and notes on the grammar. Loads llama.cpp."""
        sampling = self.sampling
        if self.sampling_seq is not None:
            if sampling.samplers != DEFAULT_SAMPLERS:
                raise InputError("--samplers and --sampling-seq cannot be used together.", "Give one of them.")
            sampling = replace(sampling, samplers=self.sampling_seq)
        if escape:
            breakers = tuple(map(unescaped, sampling.dry_sequence_breakers))
            sampling = replace(sampling, stop=tuple(map(unescaped, sampling.stop)), dry_sequence_breakers=breakers)
        grammar, notes = self._grammar()
        return replace(sampling, grammar=grammar), notes

    def _grammar(self) -> tuple[str, list[str]]:
        """The grammar in GBNF, empty for none, and sentences about it."""
        texts = {
            "--grammar": text_of(self.sampling.grammar or None, self.grammar_file, "--grammar", "--grammar-file"),
            "--json-schema": text_of(self.json_schema, self.json_schema_file, "-j", "-jf"),
            "--format": self.format,
        }
        names = [name for name, text in texts.items() if text is not None]
        if not names:
            return "", []
        if len(names) > 1:
            raise InputError(f"{' and '.join(names)} cannot be used together.", "Give one of them.")
        from moeedge.llama.samplers import check_grammar

        text, ignored = texts[names[0]] or "", list[str]()
        if names == ["--format"]:
            if text != "json":
                raise InputError(f"Unknown value of --format: {text!r}.", "Choose json, or give a schema with -j.")
            text = ANY_OBJECT
        if names != ["--grammar"]:
            text, ignored = schema_grammar(text)
        check_grammar(text)
        notes = [f"The grammar does not enforce these keywords of the JSON schema: {', '.join(ignored)}."]
        return text, notes if ignored else []


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """Which chat template writes the prompt."""

    chat_template: str | None = None
    chat_template_file: Path | None = None
    chat_template_kwargs: str | None = None
    think: str = "auto"
    reasoning_effort: str | None = None

    def choice(self) -> TemplateChoice:
        """The template and its variables. Raises InputError for wrong values."""
        source = text_of(self.chat_template, self.chat_template_file, "--chat-template", "--chat-template-file")
        if source is not None and not source.strip():
            raise InputError("The chat template is empty.", "Leave it out for the model's own, or give --raw for none.")
        arguments: dict[str, Any] = {}
        if self.chat_template_kwargs is not None:
            try:
                arguments = read_json(self.chat_template_kwargs)
            except ValueError as error:
                what = f"--chat-template-kwargs is not JSON: {error}."
                raise InputError(what, """Write for instance '{"enable_thinking": false}'.""") from None
            if not isinstance(arguments, dict):
                raise InputError("--chat-template-kwargs is not a JSON object.", """Write '{"NAME": VALUE}'.""")
        if self.reasoning_effort not in (None, "default"):
            arguments["reasoning_effort"] = self.reasoning_effort
        think = THINK_WORDS.get(self.think.lower())
        if think is None:
            raise InputError(f"Unknown value of --think: {self.think!r}.", f"Choose from: {', '.join(THINK_WORDS)}.")
        return TemplateChoice(source or "", arguments, think)


def _logit_bias(text: str) -> tuple[int, float]:
    match = _LOGIT_BIAS.fullmatch(text.strip())
    if match is None:
        raise InputError(f"--logit-bias takes a token's id and a number, not {text!r}.", "Write for instance 15043+1.")
    bias = min(float(match[3]), _ALWAYS)
    return int(match[1]), -bias if match[2] == "-" else bias


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """All options of a chat: the first message and how it goes on, what answers, and what is shown besides."""

    prompt: str | None = None
    file: Path | None = None
    system_prompt: str | None = None
    system_prompt_file: Path | None = None
    escape: bool = False
    n_predict: int = -1
    raw: bool = False
    single_turn: bool = False
    interactive: bool = False
    resume: str | None = None
    no_autosave: bool = False
    engine: LlamaOptions
    template: TemplateOptions
    sampling: SamplingOptions
    placement: PlacementOptions
    budget: BudgetOptions
    keep_cache: bool = False
    ram: int | Literal["auto", "off"] = "auto"
    context_shift: bool = False
    output: Output = Output.TEXT
    stats: Output | None = None
    quiet: bool = False
    plain: bool = False
    show_thinking: bool | None = None
    verbose: bool = False

    def texts(self) -> tuple[str | None, str]:
        """The prompt of -p or -f, and the system prompt. Raises InputError."""
        system = text_of(self.system_prompt, self.system_prompt_file, "-sys", "-sysf") or ""
        prompt = text_of(self.prompt, self.file, "-p", "-f")
        if self.raw and system:
            raise InputError("A system prompt (-sys) needs a chat template.", "Leave out --raw.")
        return (prompt and unescaped(prompt), unescaped(system)) if self.escape else (prompt, system)

    def look(self) -> Look:
        return Look(
            stats="off" if self.quiet else "full" if self.verbose else "line",
            show_thinking="auto" if self.show_thinking is None else "on" if self.show_thinking else "off",
            markdown=not self.plain,
        )
