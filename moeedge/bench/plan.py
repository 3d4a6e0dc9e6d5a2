"""What is to be measured: one frozen record of every choice."""

from __future__ import annotations

from dataclasses import dataclass

from moeedge.bench.modes import BenchMode
from moeedge.data import Dataset
from moeedge.engine.types import EngineConfig

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
