"""The two passes over a model's verifications, next to the command's figures in tests/lab/cli/test_budget.py."""

from __future__ import annotations

from pathlib import Path

from moeedge.data.prompts import Prompt, PromptMessage
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.lab.analysis.budget_recording import analyse_budgets
from moeedge.run import Run
from moeedge.scheduler.config import PlacementConfig
from tests.support.progress import SeenProgress

N_PREDICT = 8


def test_both_passes_are_told_of_and_measured(tiny_moe: Path, tiny_draft: Path) -> None:
    prompts = [Prompt(text, "", ((PromptMessage("user", text),),)) for text in ("a b a b a b", "c d c")]
    placement = PlacementConfig(cache_ratio=0.0)
    config = EngineConfig(
        model=tiny_moe, draft=tiny_draft, gamma=4, n_ctx=256, n_threads=1, device="none", placement=placement
    )
    progress = SeenProgress()
    with Session.open(config) as session:
        found = analyse_budgets(
            session,
            prompts,
            [0, 2],
            (4, 8, 16),
            n_predict=N_PREDICT,
            sampling=SamplingConfig(temperature=0),
            raw=True,
            run=Run(progress=progress),
        )
    assert progress.amounts == [1] * 4  # each pass answers the prompts anew
    assert f"profiling, {N_PREDICT} tokens" in progress.phases
    assert found.errors is not None and found.errors.errors.size
    assert found.errors.budgets == (4, 8, 16)
