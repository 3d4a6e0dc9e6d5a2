"""How the next token is drawn, what answers follow, and which chat template writes the prompt.

Defaults are llama.cpp's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from moeedge.cli.common import text_of, unescaped, valid_text
from moeedge.cli.declare import declare
from moeedge.cli.options import SAMPLING, WORK
from moeedge.engine.types import DEFAULT_SAMPLERS, SAMPLERS, SamplingConfig
from moeedge.errors import InputError
from moeedge.json_input import read_json
from moeedge.llama.chat_template import THINK_WORDS, TemplateChoice

_LETTERS = {letter: name for name, letter in SAMPLERS.items()}
_LOGIT_BIAS = re.compile(r"(\d+)([+-])(inf|\d*\.?\d+(?:e[+-]?\d+)?)", re.IGNORECASE)
_ALWAYS = 1e30  # added to a logit; JSON has no infinity
_SAMPLER_NAMES = ", ".join(SAMPLERS)
# of the configuration, where llama.cpp's options are named otherwise
_CONFIG_NAMES = {
    "temp": "temperature",
    "typical": "typical_p",
    "top_nsigma": "top_n_sigma",
    "dynatemp_exp": "dynatemp_exponent",
}

declare(
    SAMPLING,
    f"""
    --top-k K  Sample from the k most likely tokens; 0: all.
        also: LLAMA_ARG_TOP_K
    --top-p P  Sample from the most likely tokens with this cumulative probability.
        also: LLAMA_ARG_TOP_P
    --min-p P  Drop tokens less likely than this fraction of the most likely one.
        also: LLAMA_ARG_MIN_P
    --repeat-penalty X  Make repeated tokens less likely; 1: off.
        also: LLAMA_ARG_REPEAT_PENALTY
    --repeat-last-n N  Number of last tokens that the penalty considers.
    --presence-penalty X  Make the tokens of the last ones less likely, by X (of a logit); 0: off.
        also: LLAMA_ARG_PRESENCE_PENALTY
    --frequency-penalty X  The same, once for each time that a token occurs there; 0: off.
        also: LLAMA_ARG_FREQUENCY_PENALTY
    --typical P  Sample from the tokens whose probability is nearest to the average one, up to this cumulative
        probability; 1: off.
        also: --typical-p
    --top-nsigma X  Keep tokens within X standard deviations of the largest logit; -1: off.
        also: --top-n-sigma
    --xtc-probability P  Chance to drop all tokens above --xtc-threshold but the least likely of them; 0: off.
    --xtc-threshold P  Probability from which XTC drops.
    --dynatemp-range X  Let the temperature follow how uncertain the model is, by at most X up or down; 0: off.
    --dynatemp-exp X  Exponent of that uncertainty for the temperature.
    --dry-multiplier X  Make tokens less likely that continue a repeated passage (DRY); 0: off.
    --dry-base X  DRY: growth of the penalty per repeated token.
    --dry-allowed-length N  DRY: repeated tokens without a penalty.
    --dry-penalty-last-n N  DRY: number of last tokens that are searched; 0: off.
    --dry-sequence-breaker TEXT  DRY: a text that ends a passage; may be given several times, none: no text does.
        Default: line break, colon, quotation mark and asterisk.
    --samplers LIST  Samplers in this order, separated by ; or ,: {_SAMPLER_NAMES}. Default: all but infill.
    --sampling-seq LETTERS  The same in letters. Default: {"".join(SAMPLERS[name] for name in DEFAULT_SAMPLERS)}.
        also: --sampler-seq
    -l, --logit-bias ID+X  Add X to the logit of a token, or subtract it (ID-X; ID-inf: never). May be given several
        times.
    --ignore-eos  Never draw a token that ends the answer; -n N ends it.
    -r, --reverse-prompt TEXT  End the answer before TEXT. May be given several times.
        also: --stop
    --grammar GBNF  Answers follow this grammar, in llama.cpp's GBNF; it starts at root.
    --grammar-file FILE  Read the grammar from a text file.
    -j, --json-schema SCHEMA  Answers are JSON that follows this schema; '{{"type": "object"}}' is any object.
    -jf, --json-schema-file FILE  Read the JSON schema from a file.
    --format json  Answers are JSON objects, as ollama's --format json.
    """,
)
declare(
    WORK,
    """
    --chat-template NAME|JINJA  Chat template in place of the model's: one of llama.cpp's by name (chatml, llama3,
        ...), or Jinja text.
        also: LLAMA_ARG_CHAT_TEMPLATE
    --chat-template-file FILE  Read the chat template, in Jinja, from a file.
        also: LLAMA_ARG_CHAT_TEMPLATE_FILE
    --chat-template-kwargs JSON  Variables for the chat template, as a JSON object: '{"enable_thinking": false}'.
        also: LLAMA_ARG_CHAT_TEMPLATE_KWARGS
    --think auto|on|off|low|medium|high  Thinking before the answer, of models that can switch it: on, off or a
        level; auto: as the model's template has it.
        also: -rea --reasoning LLAMA_ARG_REASONING
    --reasoning-effort LEVEL  Thinking level, of models that have levels: low, medium, high, ...; default: as the
        model's template has it.
        also: LLAMA_ARG_REASONING_EFFORT
    """,
)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is drawn, and what answers follow."""

    temp: float = SamplingConfig.temperature
    top_k: int = SamplingConfig.top_k
    top_p: float = SamplingConfig.top_p
    min_p: float = SamplingConfig.min_p
    repeat_penalty: float = SamplingConfig.repeat_penalty
    repeat_last_n: int = SamplingConfig.repeat_last_n
    presence_penalty: float = SamplingConfig.presence_penalty
    frequency_penalty: float = SamplingConfig.frequency_penalty
    typical: float = SamplingConfig.typical_p
    top_nsigma: float = SamplingConfig.top_n_sigma
    xtc_probability: float = SamplingConfig.xtc_probability
    xtc_threshold: float = SamplingConfig.xtc_threshold
    dynatemp_range: float = SamplingConfig.dynatemp_range
    dynatemp_exp: float = SamplingConfig.dynatemp_exponent
    dry_multiplier: float = SamplingConfig.dry_multiplier
    dry_base: float = SamplingConfig.dry_base
    dry_allowed_length: int = SamplingConfig.dry_allowed_length
    dry_penalty_last_n: int = SamplingConfig.dry_penalty_last_n
    dry_sequence_breaker: list[str] = field(default_factory=list)
    samplers: str | None = None
    sampling_seq: str | None = None
    seed: int = -1
    logit_bias: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    reverse_prompt: list[str] = field(default_factory=list)
    grammar: str | None = None
    grammar_file: Path | None = None
    json_schema: str | None = None
    json_schema_file: Path | None = None
    format: str | None = None

    def unescaped(self) -> SamplingOptions:
        r"""The same with \n and the like replaced by what they stand for."""
        return replace(
            self,
            reverse_prompt=[unescaped(text) for text in self.reverse_prompt],
            dry_sequence_breaker=[unescaped(text) for text in self.dry_sequence_breaker],
        )

    def config(self) -> SamplingConfig:
        """The engine's configuration, without the grammar. Raises ValueError and InputError for wrong values."""
        from moeedge.ui.chat.settings import seed_or_random

        breakers = tuple(map(valid_text, self.dry_sequence_breaker)) or SamplingConfig.dry_sequence_breakers
        given = {_CONFIG_NAMES.get(name, name): value for name, value in vars(self).items()}
        known = {item.name for item in fields(SamplingConfig)} - {"grammar"}
        read = {
            "dry_sequence_breakers": tuple(text for text in breakers if text != "none"),
            "samplers": self._samplers(),
            "seed": seed_or_random(self.seed),
            "logit_bias": tuple(_logit_bias(text) for text in self.logit_bias),
            "stop": tuple(map(valid_text, self.reverse_prompt)),
        }
        return SamplingConfig(**{name: value for name, value in given.items() if name in known} | read)

    def grammar_text(self) -> tuple[str, list[str]]:
        """The grammar in GBNF, empty for none, and sentences about it. Loads llama.cpp. Raises InputError."""
        given = {
            "--grammar": text_of(self.grammar, self.grammar_file, "--grammar", "--grammar-file"),
            "--json-schema": text_of(self.json_schema, self.json_schema_file, "-j", "-jf"),
            "--format": self.format,
        }
        names = [name for name, text in given.items() if text is not None]
        if not names:
            return "", []
        if len(names) > 1:
            raise InputError(f"{' and '.join(names)} cannot be used together.", "Give one of them.")
        from moeedge.llama.json_schema import ANY_OBJECT, schema_grammar
        from moeedge.llama.samplers import check_grammar

        text = given[names[0]] or ""
        ignored: list[str] = []
        if names == ["--format"]:
            if text != "json":
                raise InputError(f"Unknown value of --format: {text!r}.", "Choose json, or give a schema with -j.")
            text = ANY_OBJECT
        if names != ["--grammar"]:
            text, ignored = schema_grammar(text)
        check_grammar(text)
        notes = [f"The grammar does not enforce these keywords of the JSON schema: {', '.join(ignored)}."]
        return text, notes if ignored else []

    def _samplers(self) -> tuple[str, ...]:
        if self.samplers is not None and self.sampling_seq is not None:
            raise InputError("--samplers and --sampling-seq cannot be used together.", "Give one of them.")
        if self.sampling_seq is not None:
            unknown = [letter for letter in self.sampling_seq if letter not in _LETTERS]
            if unknown:
                letters = ", ".join(f"{letter} {name}" for letter, name in _LETTERS.items())
                raise InputError(f"--sampling-seq has no sampler {unknown[0]!r}.", f"Choose from: {letters}.")
            return tuple(_LETTERS[letter] for letter in self.sampling_seq)
        if self.samplers is None:
            return DEFAULT_SAMPLERS
        return tuple(_sampler(name.strip()) for name in re.split("[;,]", self.samplers) if name.strip())


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


def _sampler(name: str) -> str:
    """The name of a sampler, which may be written with dashes."""
    found = name.replace("-", "_")
    if found in ("mirostat", "adaptive_p"):
        raise InputError(f"moeedge does not have the sampler {found}.", "Use top_p, min_p or typ_p.")
    if found not in SAMPLERS:
        raise InputError(f"Unknown sampler {name!r}.", f"Choose from: {_SAMPLER_NAMES}.")
    return found


def _logit_bias(text: str) -> tuple[int, float]:
    match = _LOGIT_BIAS.fullmatch(text.strip())
    if match is None:
        raise InputError(f"--logit-bias takes a token's id and a number, not {text!r}.", "Write for instance 15043+1.")
    bias = min(float(match[3]), _ALWAYS)
    return int(match[1]), -bias if match[2] == "-" else bias
