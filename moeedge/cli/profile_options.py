"""The prompts that `moeedge profile` and commands of the lab answer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeedge.cli.common import names, text_of
from moeedge.cli.options import declare
from moeedge.data.datasets import SAMPLE, TOY, load_dataset
from moeedge.data.prompts import Prompt, user_turns
from moeedge.engine.types import SamplingConfig, seed_or_random
from moeedge.errors import EmptyPromptError, InputError

declare(
    "--dataset LIST  ... Several, separated by commas, are compared.",
    "profile budget pair",
    read={names: "dataset"},
)


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The prompts to answer, and the length and the sampling of the answers."""

    prompt: str | None = None
    file: Path | None = None
    dataset: list[str] | None = None
    limit: int = 8
    offline_sample: bool = False
    n_predict: int = 128
    raw: bool = False
    temp: float = 0.0
    seed: int = -1

    def load(self, *, bundled: bool) -> tuple[list[Prompt], dict[str, Any]]:
        """The prompts (by default of the bundled model's kind for it), and the report's fields about their source."""
        if self.n_predict == 0 or self.n_predict < -1:
            raise ValueError(f"-n must be -1 (until the model stops) or at least 1, not {self.n_predict}")
        text = text_of(self.prompt, self.file, "-p", "-f")
        if text is not None:
            if self.dataset is not None:
                raise InputError("-p and --dataset cannot be used together.", "Give one of them.")
            if not text.strip():
                raise EmptyPromptError("The prompt is empty: -p is blank.", "Give some text to answer.")
            return [Prompt("prompt", "", user_turns(text))], {"dataset": "prompt", "prompts": 1}
        names = self.dataset or [TOY if bundled else SAMPLE]
        sets = [load_dataset(name, offline_sample=self.offline_sample).limited(self.limit or None) for name in names]
        for dataset in sets:
            if not dataset.prompts:
                raise InputError(f'The prompt set "{dataset.name}" is empty.')
        prompts = [replace(prompt, dataset=dataset.name) for dataset in sets for prompt in dataset.prompts]
        return prompts, {
            "dataset": ",".join(dataset.name for dataset in sets),
            "prompts": len(prompts),
            "dataset_sha256": ",".join(dataset.sha256 for dataset in sets),
        }

    def sampling(self) -> SamplingConfig:
        """Temperature and seed; a drawn seed serves all answers, so that the report and the trace can name it."""
        seed = seed_or_random(self.seed)
        if seed is None and self.temp > 0:
            seed = secrets.randbits(32)
        return SamplingConfig(temperature=self.temp, seed=seed)
