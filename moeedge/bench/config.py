"""The modes that are compared: the same engine and loop, with and without drafts, with and without our backend.

Sweeps over policies and cache ratios: every mode with our backend becomes one column per combination.

What is to be measured: one frozen record of every choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from moeedge.data import Dataset
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.llama.model import Mode

REFERENCE = "stock-ar"


@dataclass(frozen=True)
class BenchMode:
    """One column of the comparison."""

    name: str
    engine: Mode
    drafts: bool
    about: str
    policy: str | None = None  # of the expert cache; None: the engine's configuration says
    cache_ratio: float | None = None  # likewise

    @property
    def label(self) -> str:
        """The name, with what tells this column of a sweep from the others."""
        ratio = None if self.cache_ratio is None else f"{self.cache_ratio:g}"
        return " ".join(part for part in (self.name, self.policy, ratio) if part is not None)


MODES = {
    mode.name: mode
    for mode in (
        BenchMode("stock-ar", "stock", False, "stock llama.cpp, one token at a time"),
        BenchMode("stock-sd", "stock", True, "stock llama.cpp with the same draft and loop"),
        BenchMode("moeedge", "moeedge", True, "our backend with the draft"),
        BenchMode("moeedge-ar", "moeedge", False, "our backend, one token at a time"),
    )
}
DEFAULT_MODES = ("stock-ar", "stock-sd", "moeedge")


def parse_modes(text: str) -> tuple[BenchMode, ...]:
    """The modes of a comma-separated list, each once. Raises InputError for an unknown name or an empty list."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in MODES]
    if unknown or not names:
        wrong = f'There is no mode "{unknown[0]}".' if unknown else "No mode is named."
        raise InputError(wrong, f"Choose from {', '.join(MODES)}, separated by commas.")
    return tuple(MODES[name] for name in names)


def applicable_modes(modes: Sequence[BenchMode], *, has_draft: bool) -> tuple[tuple[BenchMode, ...], list[str]]:
    """The modes that make sense, and one sentence for each that was left out or changed.

    Without a draft the mode moeedge decodes one token at a time; stock-sd would be stock-ar again.
    """
    if has_draft:
        return tuple(modes), []
    kept: list[BenchMode] = []
    notes = []
    names = [mode.name for mode in modes]
    for mode in modes:
        if mode.name == "stock-sd":
            notes.append("stock-sd is left out: there is no draft, so it would be stock-ar again.")
        elif mode.name == "moeedge":
            kept.append(replace(mode, drafts=False, about="our backend, one token at a time (no draft)"))
            notes.append("moeedge runs without a draft.")
        elif mode.name == "moeedge-ar" and "moeedge" in names:
            notes.append("moeedge-ar is left out: without a draft, moeedge is the same.")
        else:
            kept.append(mode)
    return tuple(kept), notes


def mode_config(base: EngineConfig, mode: BenchMode) -> EngineConfig:
    """`base` as this mode runs it; stock modes have no expert cache."""
    placement = base.placement
    if mode.policy is not None:
        placement = replace(placement, policy=mode.policy)
    if mode.cache_ratio is not None:
        placement = replace(placement, cache_ratio=mode.cache_ratio, vram_bytes=None)
    config = replace(base, mode=mode.engine, placement=placement)
    return config if mode.drafts else replace(config, draft=None, gamma=0)


def rotated(modes: Sequence[BenchMode], turn: int) -> tuple[BenchMode, ...]:
    """The order in which the modes run for the `turn`-th time.

    A full cycle of rotations puts every mode in every place; every second cycle is reversed, so that every mode also
    comes after each other one. Slow drift of the machine (clock, heat, neighbours) then falls on all modes alike.
    """
    n = len(modes)
    cycle, shift = divmod(turn, n)
    order = [*modes[shift:], *modes[:shift]]
    return tuple(reversed(order)) if cycle % 2 else tuple(order)


NO_POLICY = "none"


def parse_policies(text: str | None, known: Iterable[str]) -> tuple[str, ...]:
    """The policies of a comma-separated list, each once; none for None. Raises InputError."""
    if text is None:
        return ()
    usable = [name for name in known if name != NO_POLICY]
    hint = f"Choose from {', '.join(usable)}, separated by commas."
    names = _split(text)
    if not names:
        raise InputError("--policy names no policy.", hint)
    for name in names:
        if name == NO_POLICY:
            raise InputError(
                'The policy "none" moves no expert: there is no cache to measure.', f"Use -dev none instead. {hint}"
            )
        if name not in usable:
            raise InputError(f'There is no policy "{name}".', hint)
    return names


def parse_ratios(text: str | None) -> tuple[float, ...]:
    """The cache ratios of a comma-separated list, each once, in the order given; none for None. Raises InputError."""
    if text is None:
        return ()
    hint = "Give numbers between 0 and 1, separated by commas."
    names = _split(text)
    if not names:
        raise InputError("--cache-ratio names no ratio.", hint)
    ratios = []
    for name in names:
        try:
            ratio = float(name)
        except ValueError:
            raise InputError(f'The cache ratio must be a number, not "{name}".', hint) from None
        if not 0 <= ratio <= 1:  # NaN too
            raise InputError(f"The cache ratio must be in [0, 1], not {name}.", hint)
        ratios.append(ratio)
    return tuple(dict.fromkeys(ratios))


@dataclass(frozen=True)
class Sweep:
    """Policies and cache ratios to compare; an empty list leaves that choice as it is."""

    policies: tuple[str, ...] = ()
    ratios: tuple[float, ...] = ()

    @property
    def asked(self) -> bool:
        """Whether anything is compared."""
        return bool(self.policies or self.ratios)

    def modes(self, modes: Sequence[BenchMode]) -> tuple[BenchMode, ...]:
        """`modes` with each that has our backend once per policy and ratio; stock modes as they are.

        Raises InputError where no mode has our backend.
        """
        if self.asked and all(mode.engine == "stock" for mode in modes):
            raise InputError("Stock modes have no expert cache.", "Name moeedge or moeedge-ar in --modes.")
        swept: list[BenchMode] = []
        for mode in modes:
            if mode.engine == "stock":
                swept.append(mode)
                continue
            for policy in self.policies or (mode.policy,):
                swept += [replace(mode, policy=policy, cache_ratio=ratio) for ratio in self.ratios or (None,)]
        return tuple(swept)


def is_swept(mode: BenchMode) -> bool:
    """Whether this column has an expert cache of its own."""
    return mode.policy is not None or mode.cache_ratio is not None


def _split(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


DEFAULT_ANSWER_TOKENS = 128
DEFAULT_REPETITIONS = 3


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """Everything that the runner needs besides the models' files; recorded in every row."""

    base: EngineConfig  # n_ctx 0: as much as the longest conversation needs
    modes: tuple[BenchMode, ...]
    dataset: Dataset | None = None  # already limited to the prompts that are to run
    limit: int | None = None
    n_predict: int = DEFAULT_ANSWER_TOKENS  # tokens of an answer at most
    n_prompt: int = 0  # synthetic prefill of this many tokens; 0: none
    n_gen: int = 0  # synthetic decoding of this many tokens; 0: none
    repetitions: int = DEFAULT_REPETITIONS
    ignore_eos: bool = False
    score: bool = False  # answers are held against the dataset's references
    run_code: bool = False  # programs that the model wrote are run for their score
    warm_up: bool = True  # every mode runs once before the first sample; otherwise the first repetition is a cold one

    def __post_init__(self) -> None:
        for name, value, least in (
            ("the number of tokens of an answer (-n)", self.n_predict, 1),
            ("the synthetic prompt (-p)", self.n_prompt, 0),
            ("the synthetic generation (-n)", self.n_gen, 0),
            ("the number of repetitions (-r)", self.repetitions, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit must be at least 1, not {self.limit}")
        if self.score and (self.dataset is None or self.ignore_eos):
            raise ValueError(
                "--score and --ignore-eos exclude each other" if self.ignore_eos else "--score needs a --dataset"
            )
        if self.run_code and not self.score:
            raise ValueError("--run-code runs programs for their score: it needs --score")
        if self.dataset is None and not self.n_prompt and not self.n_gen:
            raise ValueError("nothing to measure: no dataset, and -p and -n are 0")
