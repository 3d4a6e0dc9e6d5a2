"""What `moeedge profile` asks a model, and how it answers."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from moeedge.cli import options
from moeedge.cli.common import text_of
from moeedge.cli.declare import list_of
from moeedge.engine.types import SamplingConfig
from moeedge.errors import EmptyPromptError, InputError

if TYPE_CHECKING:
    from moeedge.data.prompts import Prompt

Datasets = Annotated[str | None, list_of(options.Dataset)]


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The prompts to answer, and the length and the sampling of the answers."""

    prompt: options.Prompt = None
    file: options.PromptFile = None
    dataset: Datasets = None
    limit: options.Limit = 8
    offline_sample: options.OfflineSample = False
    n_predict: options.NPredict = 128
    raw: options.Raw = False
    temp: options.Temp = 0.0
    seed: options.Seed = -1

    @property
    def are_chosen(self) -> bool:
        """Whether the user named a prompt or a data set."""
        return self.prompt is not None or self.file is not None or self.dataset is not None

    def load(self, *, bundled: bool) -> tuple[list[Prompt], dict[str, Any]]:
        """The prompts, and the report's fields about their source. Raises InputError and ValueError for bad options.

        bundled: the bundled model answers, by default prompts of the kind that it was trained on.
        """
        from moeedge.data.datasets import SAMPLE, TOY, load_dataset
        from moeedge.data.prompts import Prompt, user_turns

        if self.n_predict == 0 or self.n_predict < -1:
            raise ValueError(f"-n must be -1 (until the model stops) or at least 1, not {self.n_predict}")
        given = text_of(self.prompt, self.file, "-p", "-f")
        if given is not None:
            if self.dataset is not None:
                raise InputError("-p and --dataset cannot be used together.", "Give one of them.")
            if not given.strip():
                raise EmptyPromptError("The prompt is empty: -p is blank.", "Give some text to answer.")
            prompt = Prompt("prompt", "", user_turns(given))
            return [prompt], {"dataset": "prompt", "prompts": 1}
        if self.limit < 0:
            raise ValueError(f"--limit must be 0 (all) or more, not {self.limit}")
        default = TOY if bundled else SAMPLE
        names = [name.strip() for name in (self.dataset or default).split(",") if name.strip()]
        sets = [load_dataset(name, offline_sample=self.offline_sample).limited(self.limit or None) for name in names]
        empty = next((found.name for found in sets if not found.prompts), None)
        if empty is not None or not sets:
            raise InputError(f'The prompt set "{empty or self.dataset}" is empty.')
        prompts = [replace(prompt, dataset=found.name) for found in sets for prompt in found.prompts]
        return prompts, {
            "dataset": ",".join(found.name for found in sets),
            "prompts": len(prompts),
            "dataset_sha256": ",".join(found.sha256 for found in sets),
        }

    def sampling(self) -> SamplingConfig:
        """Temperature and seed; a drawn seed serves all answers, so that the report and the trace can name it."""
        from moeedge.ui.chat.settings import seed_or_random

        seed = seed_or_random(self.seed)
        if seed is None and self.temp > 0:
            seed = secrets.randbits(32)
        return SamplingConfig(temperature=self.temp, seed=seed)
