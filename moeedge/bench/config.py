"""Configuration of a benchmark: the modes that are compared, sweeps over expert caches, and the plan of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from moeedge.data.prompts import Dataset, EvaluationText
from moeedge.engine.types import DraftWord, EngineConfig
from moeedge.errors import InputError, require
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.policies.registry import POLICIES, where_simulated
from moeedge.scheduler.config import ExecutionConfig
from moeedge.scheduler.governor import GAMMA_MAX

if TYPE_CHECKING:  # imported before the options are read, which must not load llama.cpp
    from moeedge.engine.drafts import ConfidenceModel
    from moeedge.llama.model import Mode

REFERENCE = "stock-ar"
NO_POLICY = "none"
DEFAULT_REPETITIONS = 3
SYNTHETIC_PROMPT, SYNTHETIC_ANSWER = 512, 128  # the sizes of llama-bench
DEFAULT_MODES = "stock-ar,stock-sd,moeedge"
GPU_MODES = "stock-ncmoe,stock-ncmoe-sd"  # by default in addition, where a GPU can hold whole layers

DraftLength = int | Literal["auto"]
Method = Literal["shared", "ncmoe"]  # where experts are: as the target that modes share has them, or by --n-cpu-moe


@dataclass(frozen=True)
class BenchMode:
    """One column of the comparison. None: as the engine's configuration has it."""

    name: str
    engine: Mode
    drafts: bool
    policy: str | None = None  # of the expert cache
    cache_ratio: float | None = None
    execution: ExecutionConfig | None = None
    method: Method = "shared"
    budget: ExpertBudget | None = None  # of verification; lossy
    gamma: DraftLength | None = None
    source: DraftWord | None = None  # of drafts
    p_min: float | None = None  # a draft model's drafts end before a token that it gives less
    n_parallel: int | None = None  # texts that are decoded together; None: each answer on its own
    has_own_cache: bool = False  # one of several columns with our backend, each with an expert cache of its own

    @property
    def label(self) -> str:
        """The name, and the choices that distinguish this column of a sweep from the others."""
        ratio = "" if self.cache_ratio is None else f"{self.cache_ratio:g}"
        cutoff = "" if self.execution is None else f"cutoff {self.execution.cutoff_layer}"
        parallel = "" if self.n_parallel is None else f"parallel {self.n_parallel}"
        return " ".join(filter(None, (self.name, self.policy, ratio, cutoff, self.speculation, parallel)))

    @property
    def speculation(self) -> str:
        """Drafts and expert budget where they distinguish this column: "gamma 8 p-min 0.75 budget 16 (lossy)"."""
        gamma = None if self.gamma is None else f"gamma {self.gamma}"
        p_min = None if self.p_min is None else f"p-min {self.p_min:g}"
        budget = None if self.budget is None else self.budget.label
        return " ".join(filter(None, (gamma, p_min, budget)))

    @property
    def is_swept(self) -> bool:
        """Whether this column has an expert cache of its own."""
        has_choice = self.policy is not None or self.cache_ratio is not None or self.has_own_cache
        return self.engine == "moeedge" and has_choice


MODES = {
    mode.name: mode
    for mode in (
        BenchMode("stock-ar", "stock", drafts=False),  # stock llama.cpp, one token at a time
        BenchMode("stock-sd", "stock", drafts=True),  # with the same draft and loop
        BenchMode("stock-ngram", "stock", drafts=True, source="ngram"),  # with the text's own n-grams (prompt lookup)
        BenchMode("moeedge", "moeedge", drafts=True),  # our backend with the draft
        BenchMode("moeedge-ar", "moeedge", drafts=False),  # our backend, one token at a time
        # stock llama.cpp with as many whole layers on the GPU as fill the memory that moeedge takes there
        BenchMode("stock-ncmoe", "stock", drafts=False, method="ncmoe"),
        BenchMode("stock-ncmoe-sd", "stock", drafts=True, method="ncmoe"),
    )
}


def applicable_modes(modes: Sequence[BenchMode], *, has_draft: bool) -> tuple[tuple[BenchMode, ...], list[str]]:
    """Returns the modes that make sense, and one sentence for each that is left out or changed without a draft."""
    if has_draft:
        return tuple(modes), []
    plain = {"stock-sd": REFERENCE, "stock-ncmoe-sd": "stock-ncmoe"}
    plain |= {"moeedge-ar": "moeedge"} if any(mode.name == "moeedge" for mode in modes) else {}
    kept = [mode for mode in modes if mode.name not in plain]
    notes = []
    for mode in modes:
        if mode.name in plain:
            notes.append(f"{mode.name} is left out: without a draft it is the same as {plain[mode.name]}.")
        elif mode.name == "moeedge":
            notes.append("moeedge runs without a draft.")
    made = [mode if mode.source else replace(mode, drafts=False, gamma=None, p_min=None) for mode in kept]
    return tuple(dict.fromkeys(made)), list(dict.fromkeys(notes))


def mode_config(base: EngineConfig, mode: BenchMode) -> EngineConfig:
    """Returns `base` as this mode runs it."""
    own = {name: getattr(mode, name) for name in ("policy", "cache_ratio", "execution")}
    changes: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    if mode.cache_ratio is not None:
        changes["vram_bytes"] = None
    gamma = GAMMA_MAX if mode.gamma == "auto" else mode.gamma
    config = replace(
        base,
        mode=mode.engine,
        draft=mode.source or base.draft,
        draft_p_min=base.draft_p_min if mode.p_min is None else mode.p_min,
        placement=replace(base.placement, **changes),
        gamma=base.gamma if gamma is None else gamma,
        auto_gamma=mode.gamma == "auto" or (gamma is None and base.auto_gamma and mode.engine == "moeedge"),
        expert_budget=mode.budget,
        n_parallel=mode.n_parallel or 1,
    )
    return config if mode.drafts else replace(config, draft=None, gamma=0)


@dataclass(frozen=True)
class Sweep:
    """Choices that are compared besides modes; an empty tuple leaves a choice as it is."""

    policies: tuple[str, ...] = ()
    ratios: tuple[float, ...] = ()  # of expert caches
    budgets: tuple[ExpertBudget, ...] = ()
    gammas: tuple[DraftLength, ...] = ()
    counts: tuple[int, ...] = ()  # of texts decoded together

    @property
    def has_caches(self) -> bool:
        return bool(self.policies or self.ratios)

    @property
    def is_set(self) -> bool:
        return self.has_caches or bool(self.budgets or self.counts) or len(self.gammas) > 1

    def modes(self, modes: Sequence[BenchMode]) -> tuple[BenchMode, ...]:
        """Returns each mode once per choice that it has: modes of our backend per policy and ratio, and per budget.

        Stock modes that fill the same memory come once per ratio, modes with drafts once per draft length unless they
        name their own. The mode without a budget stays, before those with one. Raises InputError where no mode has an
        expert cache, or drafts to verify, or where a mode cannot decode texts together.
        """
        if self.has_caches and all(mode.engine == "stock" for mode in modes):
            reason = "The modes of llama.cpp alone (stock-...) have no expert cache."
            raise InputError(reason, "Add moeedge or moeedge-ar to --modes.")
        if self.budgets and not any(mode.engine == "moeedge" and mode.drafts for mode in modes):
            reason = "An expert budget acts on the verification of drafts, and no mode of our backend has drafts."
            raise InputError(reason, "Add moeedge to --modes, and a draft with -md.")
        swept = [lane for mode in modes for cached in self._caches(mode) for lane in self._speculation(cached)]
        alone = next((m for m in swept if self.counts and (m.method != "shared" or m.p_min is not None)), None)
        if alone is not None:
            hint = "With --parallel choose from stock-ar, stock-sd, moeedge and moeedge-ar."
            raise InputError(f"The mode {alone.label} decodes one text at a time.", hint)
        together = [replace(mode, n_parallel=count, has_own_cache=True) for count in self.counts for mode in swept]
        return tuple(dict.fromkeys(together or swept))

    def _caches(self, mode: BenchMode) -> list[BenchMode]:
        if mode.engine == "stock" and mode.method != "ncmoe":
            return [mode]
        policies = (mode.engine == "moeedge" and self.policies) or (mode.policy,)
        pairs = product(policies, self.ratios or (mode.cache_ratio,))
        return [replace(mode, policy=policy, cache_ratio=ratio) for policy, ratio in pairs]

    def _speculation(self, mode: BenchMode) -> list[BenchMode]:
        ours = mode.engine == "moeedge" and mode.drafts
        several = len(self.gammas) > 1
        own_cache = mode.has_own_cache or (ours and (several or bool(self.budgets)))
        gammas = self.gammas if mode.drafts and mode.gamma is None and several else (mode.gamma,)
        lengths = [replace(mode, gamma=gamma, has_own_cache=own_cache) for gamma in gammas]
        budgets = (None, *self.budgets) if ours else (mode.budget,)
        return [replace(length, budget=budget) for length in lengths for budget in budgets]


def parse_modes(text: str) -> tuple[BenchMode, ...]:
    """Reads a comma-separated list of modes, each kept once. Raises InputError for an unknown name or an empty list.

    A mode with drafts may name its draft length, or a range of them with a column for each, and the probability below
    which drafts end: "stock-sd:1-8", "moeedge:auto", "stock-sd:8/p0.75".
    """
    hint = f"Choose from: {', '.join(MODES)}, separated by commas."
    modes: list[BenchMode] = []
    for element in _parse_list(text, "--modes", hint):
        name, colon, lengths = element.partition(":")
        if name not in MODES:
            raise InputError(f"Unknown mode '{name}'.", hint)
        mode = MODES[name]
        lengths, slash, p_min = lengths.partition("/")
        if slash:
            mode = replace(mode, p_min=_p_min(mode, p_min))
        modes += [replace(mode, gamma=gamma) for gamma in _lengths(mode, lengths)] if colon else [mode]
    columns = Counter(mode.name for mode in modes if mode.engine == "moeedge")
    return tuple(dict.fromkeys(replace(mode, has_own_cache=columns[mode.name] > 1) for mode in modes))


def _lengths(mode: BenchMode, text: str) -> list[DraftLength]:
    """Reads "4", "1-8" or "auto" after the name of a mode. Raises InputError."""
    if not mode.drafts:
        raise InputError(
            f"The mode {mode.name} takes no draft length.", "Give one to stock-sd, stock-ngram or moeedge."
        )
    if text == "auto":
        return ["auto"]
    first, _, last = text.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= GAMMA_MAX):
        hint = f"Write for instance {mode.name}:4, {mode.name}:1-8 or {mode.name}:auto."
        raise InputError(f"'{text}' is not a draft length from 1 to {GAMMA_MAX}.", hint)
    return list(range(int(first), int(last) + 1))


def _p_min(mode: BenchMode, text: str) -> float:
    """Reads "p0.75" after a draft length. Raises InputError."""
    hint = f"Write for instance {mode.name}:8/p0.75."
    if mode.source is not None:
        raise InputError(f"The drafts of {mode.name} have no probabilities.", f"Write for instance {mode.name}:8.")
    with suppress(ValueError):
        if text.startswith("p") and 0 <= (p_min := float(text[1:])) <= 1:
            return p_min
    raise InputError(f"'{text}' is not a least probability from p0 to p1.", hint)


def parse_policies(text: str | None) -> tuple[str, ...]:
    """Reads a comma-separated list of policies, each kept once; () for None. Raises InputError."""
    if text is None:
        return ()
    usable = [name for name in POLICIES if name != NO_POLICY]
    listed = ", ".join(usable)
    hint = f"Choose from: {listed}, separated by commas."
    names = _parse_list(text, "--policy", hint)
    unusable = next((name for name in names if name not in usable), None)
    if unusable == NO_POLICY:
        instead = f"Use -dev none instead, or choose from: {listed}."
        raise InputError("The policy 'none' has no cache to measure.", instead)
    if unusable is not None:
        raise InputError(f"Unknown policy '{unusable}'.", hint + where_simulated(unusable))
    return names


def parse_ratios(text: str | None, option: str = "--cache-ratio") -> tuple[float, ...]:
    """Reads a comma-separated list of numbers in [0, 1], each kept once, in order; () for None. Raises InputError."""
    if text is None:
        return ()
    hint, ratios = f"Write for instance {option} 0.1,0.3.", dict[str, float]()
    for name in _parse_list(text, option, hint):
        with suppress(ValueError):
            ratios[name] = float(name)
        if not 0 <= ratios.get(name, -1) <= 1:  # also rejects NaN
            what = "The cache ratio must be a number" if option == "--cache-ratio" else f"{option} takes numbers"
            raise InputError(f"{what} from 0 to 1, not '{name}'.", hint)
    return tuple(dict.fromkeys(ratios.values()))


def _parse_list(text: str, option: str, hint: str) -> tuple[str, ...]:
    """Reads a comma-separated list, each element kept once. Raises InputError for an empty one."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InputError(f"{option} is an empty list.", hint)
    return names


@dataclass(frozen=True)
class SyntheticTest:
    """A test of random tokens, named as llama-bench does."""

    n_prompt: int = 0  # tokens decoded as one prompt; 0: none
    n_gen: int = 0  # tokens decoded one by one after it; 0: none
    depth: int = 0  # tokens in the KV cache before, not timed

    @property
    def name(self) -> str:
        """pp512, tg128, pp512+tg128, or one of these "@ d4096"."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def n_ctx(self) -> int:
        return self.depth + self.n_prompt + self.n_gen

    def __post_init__(self) -> None:
        has_tokens = min(self.n_prompt, self.n_gen, self.depth) >= 0 and self.n_prompt + self.n_gen > 0
        require(has_tokens, f"a synthetic test needs tokens: prompt {self.n_prompt}, decoded {self.n_gen}")


@dataclass(frozen=True)
class ScriptedTest:
    """Answers whose drafts are accepted at a given rate (engine/drafts.py)."""

    n_gen: int  # tokens of an answer
    acceptance: float  # of a draft, after those before it were accepted
    confidences: ConfidenceModel = "calibrated"
    n_before: int = 32  # tokens of the text before it

    @property
    def name(self) -> str:
        """tg128 accept 0.7."""
        return f"tg{self.n_gen} accept {self.acceptance:g}"

    @property
    def n_ctx(self) -> int:
        """Tokens that the context must hold; drafts may go beyond the end."""
        return self.n_before + self.n_gen + 2 * GAMMA_MAX

    def __post_init__(self) -> None:
        require(self.n_gen >= 2, f"an answer with scripted drafts (-n) needs 2 tokens or more, not {self.n_gen}")
        require(0 <= self.acceptance <= 1, f"an acceptance (--accept) must be from 0 to 1, not {self.acceptance:g}")


_MOST = 10**6  # tokens, repetitions, seconds, prompts: beyond what any run takes


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """Every choice of a run, recorded in every row. Raises ValueError for impossible ones."""

    base: EngineConfig  # n_ctx 0: as much as the longest conversation needs
    modes: tuple[BenchMode, ...]
    dataset: Dataset | None = None  # already limited to the prompts of the run
    limit: int | None = None
    n_predict: int = 128  # tokens of an answer at most
    tests: tuple[SyntheticTest, ...] = ()
    repetitions: int = DEFAULT_REPETITIONS
    ignore_eos: bool = False
    score: bool = False  # compare the answers with the dataset's references
    run_code: bool = False  # run programs that the model wrote, for their score
    text: EvaluationText | None = None  # for the perplexity of the modes of our backend with drafts
    delay_s: float = 0.0  # pause before each repetition of a synthetic test
    warm_up: bool = True  # run every mode once before the first sample; otherwise the first repetition is cold
    scripted: tuple[ScriptedTest, ...] = ()

    @property
    def decodes_together(self) -> bool:
        """Whether modes decode several texts at a time."""
        return any(mode.n_parallel is not None for mode in self.modes)

    @property
    def compares_speculation(self) -> bool:
        """Whether rows get figures of expert budgets: budgets or draft lengths are compared, or a text is read."""
        return self.text is not None or any(mode.budget is not None or mode.gamma is not None for mode in self.modes)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("the number of tokens of an answer (-n)", self.n_predict, 1),
            ("the number of repetitions (-r)", self.repetitions, 1),
            ("the pause (--delay)", self.delay_s, 0),
            ("--limit", 1 if self.limit is None else self.limit, 1),
        ):
            require(least <= value <= _MOST, f"{name} must be from {least} to {_MOST:,}, not {value:,}")
        require(not (self.score and self.ignore_eos), "--score and --ignore-eos cannot be used together")
        require(not self.score or self.dataset is not None, "--score needs a --dataset")
        require(not self.run_code or self.score, "--run-code runs programs for their score: it needs --score")
        for mode in self.modes if self.scripted else ():
            is_scripted = mode.source is None and mode.p_min is None
            reason = f"--accept with {mode.label}: drafts would be free, or of scripted confidence. Use -md"
            require(is_scripted, reason)
        has_budget = any(mode.budget is not None for mode in self.modes)
        require(not (self.base.routing and has_budget), "--routing and --expert-budget cannot be used together")
        forced = bool(self.scripted or self.base.routing)  # tokens or experts that are not the model's own
        own_answers = "--dataset asks for the model's own answers: not with --accept, --routing"
        require(not (forced and self.dataset), own_answers)
        require(not (forced and self.text), "--perplexity is of the model itself: not with --accept or --routing")
        has_work = self.dataset is not None or self.tests or self.scripted
        require(has_work, "nothing to measure: no dataset, and -p and -n are 0")
