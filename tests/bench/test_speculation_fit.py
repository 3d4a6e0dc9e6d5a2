"""What `moeedge fit` measures, on tiny models: sizes, times, acceptance, and the command's output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.bench import roofline
from moeedge.bench.fit_report import FitReport, read_fit
from moeedge.bench.roofline import measure_read_speed
from moeedge.bench.speculation_fit import FitPlan, run_fit
from moeedge.bench.step_times import read_weights
from moeedge.data.prompts import Prompt, user_turns
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.llama import gguf_file
from tests.conftest import TinyFactory
from tests.support.commands import refused, run, run_json

PROMPTS = [Prompt(str(i), "", user_turns(text)) for i, text in enumerate(("one two three", "four five six"))]
PLAN = FitPlan(tokens=(1, 2, 3, 4, 8, 16, 32), gammas=(1, 3), batch_sizes=(1, 8), repetitions=2, n_predict=24)


def config_of(target: Path, draft: Path | None) -> EngineConfig:
    return EngineConfig(model=target, draft=draft, n_ctx=512, n_threads=1, n_gpu_layers=0, device="none")


def test_weights_are_those_of_the_header(tiny_moe: Path) -> None:
    """Dense and expert bytes together are all tensors but the input embedding."""
    weights = read_weights(tiny_moe)
    tensors = gguf_file.read_tensors(tiny_moe)
    names = {tensor.name for tensor in tensors}
    embedding = next(tensor.size_bytes for tensor in tensors if tensor.name == "token_embd.weight")
    total = sum(tensor.size_bytes for tensor in tensors) - (embedding if "output.weight" in names else 0)
    assert weights.dense_bytes + 16 * weights.expert_bytes == pytest.approx(total)
    assert weights.step_bytes(4) == pytest.approx(weights.dense_bytes + 4 * weights.expert_bytes)
    assert weights.step_flops(4) == pytest.approx(2 * weights.dense_weights + 8 * weights.expert_weights)


def test_the_read_speed_is_a_rate_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e8 < measure_read_speed(1) < 1e12
    monkeypatch.setattr(roofline, "available_memory", lambda: 1 << 20)
    assert measure_read_speed(1) == 0.0


def test_report_holds_what_was_measured_and_predicted(tiny_moe: Path, tiny_draft: Path) -> None:
    parts: list[tuple[str, int]] = []
    report = run_fit(
        config_of(tiny_moe, tiny_draft), PROMPTS, PLAN, on_part=lambda label, total: parts.append((label, total))
    )
    shapes = [(point.n_tokens, point.n_sequences, point.n_used) for point in report.times.target]
    alone, together = {(t, 1, k) for t in PLAN.tokens for k in (4, 2)}, {(8 * each, 8, 4) for each in (1, 2, 3, 5)}
    assert set(shapes) == alone | together and len(shapes) == len(set(shapes))
    assert all(len(point.samples_s) == 2 and point.seconds > 0 for point in report.times.target)
    for point in report.times.target:
        assert point.unique_experts is not None
        assert point.n_used <= point.unique_experts <= min(16, point.n_used * point.n_tokens)
    assert [(point.n_tokens, point.n_sequences) for point in report.times.draft] == [(1, 1), (8, 8)]
    assert [point.n_tokens for point in report.times.reject] == list(PLAN.tokens)
    assert [row.gamma for row in report.speed_ups] == [1, 3]
    for row in report.speed_ups:
        assert row.measured is not None and row.measured > 0 and row.from_times is not None
        assert 1 <= row.tokens_per_step <= row.gamma + 1
    assert report.share_measured is not None and 0 <= report.share_measured <= 1
    assert [row.n_tokens for row in report.amdahl] == [2, 3, 4, 8, 16, 32]
    assert report.fit.model.in_sequence != report.other_fit.model.in_sequence
    assert report.fit.left_out_error is not None and report.other_fit.left_out_error is not None
    assert report.fit.left_out_error <= report.other_fit.left_out_error
    assert len(parts) == 5 and not report.interrupted
    assert {row.n_used for row in report.outlooks} == {1, 2, 4, 8}


def test_a_written_fit_predicts_the_same(tiny_moe: Path, tiny_draft: Path, tmp_path: Path) -> None:
    report = run_fit(config_of(tiny_moe, tiny_draft), PROMPTS, replace(PLAN, n_used=(4,), measure_speed_up=False))
    file = tmp_path / "fit.json"
    file.write_text(json.dumps(report.as_dict()))
    pair = read_fit(file)
    own = [row for row in report.outlooks if (row.machine, row.n_used) == ("this", 4)]
    assert len(own) == 4
    for row in own:
        assert pair.speed_up(row.gamma, row.batch_size) == pytest.approx(row.speed_up)
    assert pair.speed_up(4, 1) is None  # acceptance was counted for drafts of up to 3
    assert (pair.target, pair.draft, pair.max_tokens) == (tiny_moe.name, tiny_draft.name, 40)


@pytest.mark.parametrize("content", ["", "[]", '{"times": {}}'])
def test_other_files_are_no_fit(content: str, tmp_path: Path) -> None:
    file = tmp_path / "fit.json"
    file.write_text(content)
    with pytest.raises(InputError):
        read_fit(file)
    with pytest.raises(InputError):
        read_fit(tmp_path / "missing.json")


def test_interruption_fits_what_there_is_or_says_so(tiny_moe: Path, tiny_draft: Path) -> None:
    def fit_until(part: str) -> FitReport:
        begun: list[str] = []
        return run_fit(
            config_of(tiny_moe, tiny_draft),
            PROMPTS,
            PLAN,
            cancel=lambda: any(label.startswith(part) for label in begun),
            on_part=lambda label, _total: begun.append(label),
        )

    with pytest.raises(InputError, match="stopped"):
        fit_until("timing")
    report = fit_until("decoding")
    assert report.interrupted and report.as_dict()["interrupted"]
    alone = [point for point in report.times.target if point.n_sequences == 1]
    assert [(point.n_tokens, point.n_used) for point in alone] == [(t, 4) for t in PLAN.tokens]
    assert [row.measured for row in report.speed_ups] == [None, None] and report.share_measured is None


@pytest.mark.parametrize("head", ["eagle3", "dflash"])
def test_heads_have_no_time_to_fit(head: str, tiny: TinyFactory) -> None:
    with pytest.raises(InputError, match="head"):
        run_fit(config_of(tiny("qwen3moe"), tiny(head)), PROMPTS, PLAN)


def test_without_a_draft_the_acceptance_is_asked_for(tiny_moe: Path) -> None:
    config = config_of(tiny_moe, None)
    with pytest.raises(InputError, match="Without a draft"):
        run_fit(config, PROMPTS, PLAN)
    plan = FitPlan(tokens=PLAN.tokens, gammas=(2,), batch_sizes=(1,), n_used=(4,), repetitions=1, acceptance_chance=0.5)
    report = run_fit(config, PROMPTS, plan)
    assert report.acceptance.at_least == (0.5, 0.25) and report.times.draft == ()
    assert report.speed_ups[0].tokens_per_step == 1.75 and report.speed_ups[0].measured is None


def test_dense_models_are_refused(tiny_draft: Path) -> None:
    with pytest.raises(InputError, match="no experts"):
        run_fit(config_of(tiny_draft, None), PROMPTS, PLAN)


@pytest.mark.parametrize(
    "plan",
    [
        {"tokens": (2, 3, 4, 5, 6, 7)}, {"tokens": (1, 2, 3)}, {"tokens": (1, 2, 3, 4, 5, 65)}, {"gammas": (0, 1)},
        {"gammas": ()}, {"batch_sizes": (0,)}, {"repetitions": 0},
    ],
)  # fmt: skip
def test_plans_are_checked(plan: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="--"):
        FitPlan(**plan)  # type: ignore[arg-type]


def test_command(tiny_moe: Path, tiny_draft: Path, tmp_path: Path) -> None:
    picture = tmp_path / "fit.png"
    pair = ["-m", str(tiny_moe), "-md", str(tiny_draft), "-c", "512", "-t", "1", "--limit", "2", "-n", "24", "-r", "1"]
    work = ["--dataset", "toy", "--batch-tokens", "1,2,3,4,6,8,16", "--draft-max", "1,2", "--batch-sizes", "1,4"]
    report = run_json("fit", *pair, *work, "--n-expert-used", "4", "--plot", str(picture))
    assert picture.stat().st_size > 10_000
    assert set(report["parameters"]) == set(report["lower_bounds"]) and len(report["parameters"]) == 10
    assert report["left_out_error"] > 0 and len(report["left_out"]) == 7 + 5
    assert {row["machine"] for row in report["outlook"]} == {"this", "rtx4090-pcie4", "h200"}
    text = run("fit", *pair, *work, "--n-expert-used", "4", "--no-measure-speed-up", "--what-if-hardware", "none")
    assert text.exit_code == 0 and "Amdahl" in text.stdout


def test_bad_input_is_refused(tiny_moe: Path, tiny_draft: Path) -> None:
    pair = ["-m", str(tiny_moe), "-md", str(tiny_draft), "-c", "512"]
    assert "9 per token" in refused("fit", *pair, "--n-expert-used", "9", "--dataset", "toy", "-t", "1")
    assert "0 per token" in refused("fit", *pair, "--dataset", "toy", "-t", "1", "--what-if-used", "0")
    assert "hardware" in refused("fit", *pair, "--what-if-hardware", "abacus")
    assert "--batch-tokens" in refused("fit", *pair, "--batch-tokens", "1,2")
