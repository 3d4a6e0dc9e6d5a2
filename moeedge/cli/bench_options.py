"""The options of `moeedge bench`: lists of sizes, depths and threads as llama-bench has them, and comparisons."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from moeedge import paths
from moeedge.cli import budget_options, llama_options, options
from moeedge.cli.budget_options import expect_no_companions, make_budget, parse_number
from moeedge.cli.declare import derive, list_of, option
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.bench.config import DraftLength, SyntheticTest
    from moeedge.data.texts import EvaluationText
    from moeedge.engine.types import EngineConfig
    from moeedge.policies.expert_budget import ExpertBudget

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
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?", part.strip(), re.ASCII)
        if match is None:
            raise InputError(
                f"{option} takes numbers of at least 0, not '{part.strip()}'.",
                "Write them as 64,128 or as a range: 64-512*2, 0-1024+256.",
            )
        first, last, sign, step = int(match[1]), int(match[2] or match[1]), match[3], int(match[4] or 1)
        found += _range(first, last, sign, step, option)
    return list(dict.fromkeys(found))


def _range(first: int, last: int, sign: str | None, step: int, option: str) -> list[int]:
    if last < first or step < 1 or (sign == "*" and (step < 2 or first < 1)):
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


_NO_TEXT = "none"

Budgets = Annotated[
    str | None,
    derive(
        budget_options.BudgetList,
        metavar="LIST",
        help="Verify drafts with at most so many experts per layer (MoE-Spec), for instance 16,24,32: moeedge once per "
        "budget next to moeedge without. Lossy: rows say so, and the output check gives a figure of quality.",
    ),
]
BudgetRankings = Annotated[str | None, list_of(budget_options.BudgetRanking)]
BudgetPolicies = Annotated[str | None, list_of(budget_options.BudgetPolicy)]
DraftMaxima = Annotated[
    str | None,
    derive(
        options.DraftLength,
        metavar="LIST",
        help="Tokens per draft (gamma); 0: no speculation; auto: as many as pay by what steps have cost. Several, "
        "separated by commas, are compared. Default: auto for the mode moeedge, unless caches, budgets or texts "
        "together are compared or perplexity is measured; otherwise the catalog's value for the "
        "model, or 4.",
    ),
]
PerplexityText = Annotated[
    str | None,
    option(
        options.BUDGET,
        "--perplexity FILE|toy|none",
        "A text on which the modes of our backend with drafts are compared by perplexity, decoded in batches of "
        "gamma + 1 tokens. Default: toy, the bundled pair's, for that with --expert-budget, otherwise none.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class BudgetSweepOptions:
    """Expert budgets to compare, and a text to compare them on."""

    expert_budget: Budgets = None
    budget_ranking: BudgetRankings = None
    budget_policy: BudgetPolicies = None
    perplexity: PerplexityText = None

    def parse(self) -> tuple[ExpertBudget, ...]:
        """Every budget with each ranking and policy; "off" is none of them, and always measured. Raises InputError."""
        from moeedge.bench.config import parse_list

        hint = "Give experts per layer, separated by commas, for instance 16,24,32."
        listed = () if self.expert_budget is None else parse_list(self.expert_budget, "--expert-budget", hint)
        numbers = [number for number in map(parse_number, listed) if number is not None]
        if not numbers:
            expect_no_companions(self, "LIST")
        return tuple(
            make_budget(number, ranking=ranking, policy=policy)
            for ranking in _listed(self.budget_ranking, "--budget-ranking")
            for policy in _listed(self.budget_policy, "--budget-policy")
            for number in numbers
        )

    def text(self, model: Path) -> EvaluationText | None:
        """The text of --perplexity. Raises DatasetError."""
        from moeedge.data.texts import TOY_TEXT, load_text

        name = self.perplexity
        if name is None and self.expert_budget is not None and paths.is_bundled(model):
            name = TOY_TEXT
        return None if name in (None, _NO_TEXT) else load_text(name)


def parse_gammas(text: str | None) -> tuple[DraftLength, ...]:
    """The draft lengths of --draft-max, () for None. Raises InputError."""
    from moeedge.bench.config import parse_list, parse_numbers

    gammas: tuple[DraftLength, ...] = ()
    if text is not None:
        lengths = parse_list(text, "--draft-max", "Give numbers of tokens or auto, separated by commas.")
        numbers = ",".join(length for length in lengths if length != "auto")
        gammas = parse_numbers(numbers, "--draft-max", least=0) if numbers else ()
        gammas += ("auto",) if "auto" in lengths else ()
    if len(gammas) > 1 and 0 in gammas:
        raise InputError("A draft length of 0 is plain decoding.", "Compare with the mode moeedge-ar instead.")
    return gammas


def _listed(text: str | None, name: str) -> tuple[str | None, ...]:
    from moeedge.bench.config import parse_list

    return (None,) if text is None else parse_list(text, name, "Separate names by commas.")


Parallel = Annotated[
    str | None,
    option(
        options.WORK,
        "--parallel LIST",
        "Decode N prompts of the dataset together, each with its own drafts, once per N: throughput, and what "
        "speculation gains over plain decoding with the same N. First turns only.",
        also="-np",
    ),
]


def parallel_counts(text: str | None) -> tuple[int, ...]:
    """Numbers of texts, ascending; () without --parallel. Raises InputError."""
    from moeedge.bench.config import parse_numbers
    from moeedge.engine.types import MAX_N_PARALLEL

    counts = () if text is None else parse_numbers(text, "--parallel", least=1)
    if max(counts, default=0) > MAX_N_PARALLEL:
        raise InputError(
            f"At most {MAX_N_PARALLEL} texts are decoded together, not {max(counts)}.", "Use a smaller --parallel."
        )
    return tuple(sorted(counts))
