"""The options of `moeedge bench` that llama-bench has: lists of sizes, depths and threads, and pauses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from moeedge.cli import llama_options, options
from moeedge.cli.declare import derive, list_of, option
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.bench.config import SyntheticTest
    from moeedge.engine.types import EngineConfig

# the sizes of llama-bench
SYNTHETIC_PROMPT = 512
SYNTHETIC_ANSWER = 128
_MAX_VALUES = 1000  # of a range

NPrompt = Annotated[
    str | None,
    option(
        options.WORK,
        "-p, --n-prompt LIST",
        "Prompts of N random tokens: a row ppN for each N of the list (64,128 or 64-256*2); 0: none. Default: 512 "
        "without --dataset, none with it.",
    ),
]
NPredict = Annotated[
    str | None,
    derive(
        options.NPredict,
        metavar="LIST",
        help="Without --dataset: decode N random tokens, a row tgN for each N; 0: none. With --dataset: at most N "
        "tokens per answer. Default: 128; with --score what answers to the dataset need.",
    ),
]
Pairs = Annotated[
    list[str],
    option(
        options.WORK,
        "-pg PP,TG",
        "In addition: a prompt of PP random tokens, then TG tokens decoded, as one row ppPP+tgTG. Several times: "
        "several rows.",
    ),
]
Depths = Annotated[
    str | None,
    option(
        options.WORK,
        "-d, --n-depth LIST",
        'Tokens in the context before each synthetic test, not timed: rows "pp512 @ d4096".',
    ),
]
Threads = Annotated[
    str | None,
    derive(
        options.Threads, metavar="LIST", help="CPU threads; 0: one per physical core. Several are measured one by one."
    ),
]
BatchSizes = Annotated[str | None, list_of(llama_options.BatchSize)]
UbatchSizes = Annotated[str | None, list_of(llama_options.UbatchSize)]
Delay = Annotated[
    float, option(options.WORK, "--delay S", "Wait S seconds before each repetition of a synthetic test.")
]


@dataclass(frozen=True, kw_only=True)
class SyntheticOptions:
    """Sizes of the tests with random tokens."""

    n_prompt: NPrompt = None
    pairs: Pairs = ()  # type: ignore[assignment]
    n_depth: Depths = None
    delay: Delay = 0.0

    @property
    def is_asked(self) -> bool:
        """Whether a synthetic test was asked for."""
        return self.n_prompt is not None or bool(self.pairs)

    def tests(self, n_predict: str | None, *, has_dataset: bool) -> tuple[SyntheticTest, ...]:
        """The tests as llama-bench orders them: prompts, decoding and pairs of each depth. Raises InputError."""
        prompts = [0 if has_dataset else SYNTHETIC_PROMPT] if self.n_prompt is None else sizes(self.n_prompt, "-p")
        answers = [] if has_dataset else [SYNTHETIC_ANSWER] if n_predict is None else sizes(n_predict, "-n")
        pairs = [_pair(text) for text in self.pairs]
        depths = [0] if self.n_depth is None else sizes(self.n_depth, "-d")
        found = synthetic_tests(prompts, answers, pairs, depths)
        if self.n_depth is not None and not found:
            raise InputError("-d is the depth of synthetic tests, and there are none.", "Add -p 512.")
        return found


def synthetic_tests(
    prompts: Sequence[int], answers: Sequence[int], pairs: Sequence[tuple[int, int]] = (), depths: Sequence[int] = (0,)
) -> tuple[SyntheticTest, ...]:
    """Tests of these sizes, each once; sizes of 0 are none."""
    from moeedge.bench.config import SyntheticTest

    found = []
    for depth in depths:
        found += [SyntheticTest(n, 0, depth) for n in prompts if n]
        found += [SyntheticTest(0, n, depth) for n in answers if n]
        found += [SyntheticTest(prompt, answer, depth) for prompt, answer in pairs]
    return tuple(dict.fromkeys(found))


def sizes(text: str, option: str) -> list[int]:
    """Reads "64,128", also with llama-bench's ranges: "1-4", "0-1024+256", "64-512*2". Raises InputError."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, rest = part.strip().partition("-")
        last, sign, step = rest.partition("+") if "*" not in rest else rest.partition("*")
        numbers = [first, *([last] if dash else []), *([step] if sign else [])]
        if not all(number.isdecimal() for number in numbers):
            raise InputError(
                f"{option} takes numbers of at least 0, not '{part.strip()}'.",
                "Write them as 64,128 or as a range: 64-512*2, 0-1024+256.",
            )
        values = [int(number) for number in numbers]
        found += _range(values, sign, option)
    return list(dict.fromkeys(found))


def _range(values: Sequence[int], sign: str, option: str) -> list[int]:
    first, last = values[0], values[min(1, len(values) - 1)]
    step = values[2] if sign else 1
    if last < first or (sign == "+" and step < 1) or (sign == "*" and (step < 2 or first < 1)):
        raise InputError(f"{option}: a range has no end.", "Write it as first-last+step or first-last*factor.")
    n_values = (last - first) // step + 1 if sign != "*" else 1
    if n_values > _MAX_VALUES:
        message = f"{option}: a range of {n_values:,} values."
        raise InputError(message, f"At most {_MAX_VALUES:,} are measured in one run.")
    found = [first]
    while (following := found[-1] * step if sign == "*" else found[-1] + step) <= last:
        found.append(following)
    return found


def _pair(text: str) -> tuple[int, int]:
    prompt, _, answer = text.partition(",")
    if not (prompt.isdecimal() and answer.isdecimal() and int(prompt) and int(answer)):
        raise InputError(f"-pg takes two numbers of tokens, not '{text}'.", "Write for instance -pg 512,128.")
    return int(prompt), int(answer)


def contexts(base: EngineConfig, threads: str | None, batches: str | None, ubatches: str | None) -> list[EngineConfig]:
    """The configuration once per number of threads and size of batches. Raises InputError, and ValueError for sizes."""
    lists = [
        [getattr(base, name)] if text is None else sizes(text, option)
        for name, text, option in (
            ("n_threads", threads, "-t"),
            ("n_batch", batches, "-b"),
            ("n_ubatch", ubatches, "-ub"),
        )
    ]
    return [replace(base, n_threads=t, n_batch=b, n_ubatch=ub) for t, b, ub in itertools.product(*lists)]


def single(text: str | None, option: str) -> int | None:
    """The value of an option that has a list without --dataset. Raises InputError."""
    if text is None:
        return None
    values = sizes(text, option)
    if len(values) > 1:
        raise InputError(f"With --dataset {option} takes one number, not '{text}'.", "Leave out --dataset, or choose.")
    return values[0]
