"""Complete runs on tiny random-weight models: measurements, equal outputs, interruptions, sweeps over caches."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from moeedge.bench import arms
from moeedge.bench.config import REFERENCE, BenchPlan, Sweep
from moeedge.bench.records import SCHEMA, BenchRow
from moeedge.bench.samples import CacheFigures
from moeedge.errors import ContextTooSmallError
from moeedge.records import as_dict
from moeedge.scheduler.config import PlacementConfig
from tests.bench.recording import Recorder, make_plan, run, write_conversations

# plain greedy decoding with llama_cpp's low-level calls; prompts come in, answers go out as JSON
_STOCK = """
import json, sys
from pathlib import Path
from tests.support.stock import StockContext, silence
silence()
job = json.load(sys.stdin)
with StockContext(Path(job["model"]), n_ctx=job["n_ctx"], n_threads=1, n_batch=2048, n_ubatch=512) as stock:
    answers = [stock.greedy(prompt, job["n_predict"])[0] for prompt in job["prompts"]]
print(json.dumps({"answers": answers, "moeedge": [name for name in sys.modules if name.startswith("moeedge")],
                  "mapped": "libmoeedge" in Path("/proc/self/maps").read_text()}))
"""


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path, tiny_draft: Path
) -> tuple[list[BenchRow], Recorder]:
    """Three modes, two repetitions of two conversations with three turns."""
    return run(make_plan(tiny_moe, tiny_draft, dataset=write_conversations(tmp_path_factory.mktemp("talk"))))


def test_three_modes_on_the_same_conversations(finished: tuple[list[BenchRow], Recorder]) -> None:
    recorder = finished[1]
    rows = {row.mode: row for row in finished[0]}
    assert list(rows) == ["stock-ar", "stock-sd", "moeedge"]
    assert len(recorder.samples) == recorder.total == 3 * 2 * 3  # turns x repetitions x modes
    for row in rows.values():
        assert row.test == "talk"
        assert row.output is not None and row.output.passed and row.output.compared == 2
        assert len(row.pp.values) == len(row.tg.values) == 2
        assert row.ttft_s is not None
    plain, drafted, ours = rows["stock-ar"], rows["stock-sd"], rows["moeedge"]
    assert (plain.ratio, plain.ratio_pp, plain.tokens_per_step, plain.acceptance_rate) == (1.0, 1.0, 1.0, None)
    assert drafted.acceptance_rate == ours.acceptance_rate  # the same drafts in the same loop
    assert drafted.experts_per_verification is None  # stock senses nothing
    assert 4 <= ours.experts_per_verification <= 16  # at least top-k, at most all
    assert ours.cache == CacheFigures()


def test_turns_are_one_conversation(finished: tuple[list[BenchRow], Recorder]) -> None:
    first, second = (
        [s for s in finished[1].samples if (s.prompt, s.turn, s.repetition) == ("two-turns", turn, 0)]
        for turn in (0, 1)
    )
    assert len(first) == len(second) == 3
    assert {tuple(sample.prompt_ids) for sample in second} == {tuple(second[0].prompt_ids)}  # the same prompt for all
    for sample in first:  # the KV cache holds nothing of the warm-up or the previous prompt
        assert sample.prefill_tokens == sample.prompt_tokens
    for sample in second:  # the conversation so far is in the KV cache
        assert sample.prompt_tokens > first[0].prompt_tokens + 12
        assert sample.prefill_tokens < sample.prompt_tokens - first[0].prompt_tokens // 2


def test_modes_change_places(finished: tuple[list[BenchRow], Recorder]) -> None:
    places = {(s.prompt, s.turn, s.repetition, s.mode): s.order for s in finished[1].samples}
    assert {order for (*_, mode), order in places.items() if mode == REFERENCE} == {0, 1, 2}


def test_stock_ar_equals_a_process_without_our_library(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    """It loads neither moeedge nor its native library; all other modes give the same tokens, turn by turn."""
    dataset, n_predict = write_conversations(tmp_path), 40
    plan = make_plan(tiny_moe, tiny_draft, dataset=dataset, n_predict=n_predict, repetitions=1, ignore_eos=True)
    rows, recorder = run(plan)
    # the first turns: on an empty KV cache both sides decode the same batches
    ours = [sample for sample in recorder.samples if sample.mode == REFERENCE and sample.turn == 0]
    assert len(ours) == 2
    job = {"model": str(tiny_moe), "n_ctx": rows[0].setup.n_ctx, "n_predict": n_predict}
    job["prompts"] = [sample.prompt_ids for sample in ours]
    done = subprocess.run(
        [sys.executable, "-c", _STOCK],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    answers = [sample.tokens for sample in ours]
    assert json.loads(done.stdout) == {"answers": answers, "moeedge": [], "mapped": False}
    references = {sample.key: sample.tokens for sample in recorder.samples if sample.mode == REFERENCE}
    assert all(sample.tokens == references[sample.key] for sample in recorder.samples)


def test_without_a_draft_the_ratio_is_the_cost_of_the_backend(tmp_path: Path, tiny_moe: Path) -> None:
    plan = make_plan(tiny_moe, None, dataset=write_conversations(tmp_path))
    rows, _ = run(plan)
    assert [row.mode for row in rows] == ["stock-ar", "moeedge"]
    ours = rows[1]
    assert ours.output.text == "2/2"  # the same kernels on the same batches: no near-tie is permitted
    assert (ours.tokens_per_step, ours.setup.draft, ours.setup.gamma) == (1.0, "none", 0)
    assert ours.ratio is not None and ours.ratio > 0
    assert ours.best_stock == () and as_dict(ours)["ratio_best_stock"] is None  # with one stock mode


def test_a_dense_model_with_ngram_drafts(tmp_path: Path, tiny_draft: Path) -> None:
    plan = make_plan(tiny_draft, "ngram", dataset=write_conversations(tmp_path), n_predict=40, repetitions=1)
    rows, recorder = run(plan)
    assert any("dense" in note for note in recorder.notes)
    assert all(row.experts_per_verification is None for row in rows)
    assert all(row.output is not None and row.output.passed for row in rows)
    assert [row.setup.draft for row in rows] == ["none", "ngram", "ngram"]
    assert rows[1].acceptance_rate is not None


def test_synthetic_rows(tiny_moe: Path, tiny_draft: Path) -> None:
    found, recorder = run(make_plan(tiny_moe, tiny_draft, n_prompt=24, n_gen=36))
    rows = {(row.test, row.mode): row for row in found}
    assert list(rows) == [("pp24", "stock-ar"), ("pp24", "moeedge"), ("tg36", "stock-ar"), ("tg36", "moeedge")]
    assert any("stock-sd" in note for note in recorder.notes)
    prefill, decoding = rows["pp24", "moeedge"], rows["tg36", "moeedge"]
    assert (prefill.tg, prefill.output, prefill.setup.draft) == (None, None, "none")
    assert len(prefill.pp.values) == 2
    assert decoding.pp is None and decoding.ratio is not None
    assert [sample.decode_tokens for sample in decoding.samples] == [16, 16, 4] * 2  # in slices
    assert len(decoding.tg.values) == 2
    assert recorder.total == len(recorder.samples) == 2 * 2 * (1 + 3)


def test_the_context_is_what_the_prompts_need(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    plan = make_plan(tiny_moe, tiny_draft, dataset=write_conversations(tmp_path, n=3), n_predict=2, n_ctx=256)
    (row, *_), recorder = run(plan)
    assert any(note.startswith("1 of 3 prompts") for note in recorder.notes)
    assert (row.setup.prompts, row.setup.prompts_left_out, row.setup.n_ctx) == (2, 1, 256)
    short = make_plan(tiny_moe, None, dataset=write_conversations(tmp_path), n_ctx=16)
    with pytest.raises(ContextTooSmallError, match="No prompt fits"):
        run(short)


def test_the_record_names_the_choices_behind_its_figures(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    dataset = write_conversations(tmp_path)
    rows, _ = run(make_plan(tiny_moe, tiny_draft, dataset=dataset, limit=5, repetitions=1, n_prompt=8))
    records = [json.loads(json.dumps(as_dict(row))) for row in rows]
    assert all(list(record) == list(records[0]) for record in records)
    assert [(record["test"], record["prompts"]) for record in records] == [("talk", 2)] * 3 + [("pp8", None)] * 2
    record = records[2]
    known = {"schema": SCHEMA, "mode": "moeedge", "test": "talk", "threads": 1, "gamma": 3, "n_experts": 16, "limit": 5}
    known |= {"draft": tiny_draft.name, "model": tiny_moe.name, "n_predict": 12, "repetitions": 1, "utility_cap": 4}
    known |= {"ablations": "", "dataset_sha256": dataset.sha256, "llama_cpp_version": version("llama-cpp-python")}
    n_ties = len({tie["prompt"] for tie in record["near_ties"]})
    known |= {"output_equal": record["output_compared"] - n_ties, "different": []}
    assert {key: record[key] for key in known} == known
    assert record["output_check"] == f"{record['output_equal']}/{record['output_compared']}"
    assert len(record["pp_ts_samples"]) == 1
    assert len(record["samples"]) == 3
    sample = record["samples"][0]
    assert record["mode"] not in sample.values()
    keys = "prompt turn repetition order prefill_s decode_s ttft_s steps drafted accepted"
    assert set(keys.split()) <= set(sample)
    assert record["cpu"] and record["version"] and record["time"].endswith("+00:00")


def _plan(tiny_moe: Path, tiny_draft: Path, sweep: Sweep, **options: Any) -> BenchPlan:
    plan = make_plan(tiny_moe, tiny_draft, **options)
    base = replace(plan.base, device="emulated", placement=PlacementConfig(calibrate=False))
    return replace(plan, base=base, modes=sweep.modes(plan.modes))


def test_a_row_per_policy_and_ratio_and_stock(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    sweep = Sweep(("spac", "lru"), (0.25, 1))
    rows, recorder = run(_plan(tiny_moe, tiny_draft, sweep, dataset=write_conversations(tmp_path)))
    assert [(row.mode, row.policy, row.cache_ratio) for row in rows] == [
        ("stock-ar", "none", None),
        ("stock-sd", "none", None),
        *(("moeedge", policy, ratio) for policy in ("spac", "lru") for ratio in (0.25, 1)),
    ]
    assert len(recorder.samples) == recorder.total == 6 * 3 * 2  # modes x turns x repetitions
    for row in rows:
        record = json.loads(json.dumps(as_dict(row)))
        assert row.output is not None and row.output.passed
        assert record["warm"] is True
        counters = [sample["placement"] for sample in record["samples"]]
        if row.mode != "moeedge":
            assert counters == [None] * 6
            assert record["device"] == record["policy"] == "none"
            keys = "cache_slots pool_bytes hit_rate_pairs hit_rate_experts uploads_per_layer_step bytes_moved"
            assert {record[key] for key in keys.split()} == {None}
            continue
        assert record["device"].startswith("emulated")
        assert record["cache_slots"] == 48 * row.cache_ratio  # 3 layers of 16 experts
        assert record["pool_bytes"] > 0

        def total(key: str, counters: list[dict[str, float]] = counters) -> float:
            return sum(sample[key] for sample in counters)

        # rates are those of the sums over the samples, and the counters of each sample add up
        assert record["hit_rate_pairs"] == total("pairs_hit") / total("pairs")
        assert record["hit_rate_experts"] == total("unique_hit") / total("unique")
        assert record["uploads_per_layer_step"] == total("uploads") / (total("steps") * record["n_expert_layers"])
        assert record["bytes_moved"] == total("bytes_moved")
        for sample in record["samples"]:
            assert sample["placement"]["steps"] == sample["steps"]
            verified = sample["steps"] + sample["drafted"]
            assert sample["placement"]["pairs"] == verified * record["n_experts_used"] * record["n_expert_layers"]
    # all experts have a slot, and the warm-up has filled those that it used
    assert all((row.cache.hit_rate_pairs or 0) > 0.9 for row in (rows[3], rows[5]))


def test_caches_that_do_not_fit_are_measured_one_by_one(
    tmp_path: Path, tiny_moe: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "_USABLE", 0.0)
    sweep = Sweep(("spac", "lru", "static"), (0.25,))
    rows, recorder = run(_plan(tiny_moe, tiny_draft, sweep, dataset=write_conversations(tmp_path, n=1)))
    assert [(row.mode, row.policy) for row in rows] == [
        ("stock-ar", "none"), ("stock-sd", "none"), ("moeedge", "spac"), ("moeedge", "lru"), ("moeedge", "static"),
    ]  # fmt: skip
    assert any("one after the other" in note for note in recorder.notes)
    assert len(recorder.samples) == recorder.total == (3 + 2 + 2) * 2 * 2  # stock-ar with each of them
    for row in rows:
        assert len(row.samples) == 4
        assert row.ratio is not None
        assert row.output is not None and row.output.passed


def test_without_a_warm_up_the_first_repetition_is_cold(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    plan = _plan(tiny_moe, tiny_draft, Sweep(("lru",), (1,)), dataset=write_conversations(tmp_path, n=1))
    rows, _ = run(replace(plan, warm_up=False))
    swept = rows[-1]
    assert [(sample.repetition, sample.warm) for sample in swept.samples] == [
        (0, False), (0, False), (1, True), (1, True),
    ]  # fmt: skip
    assert as_dict(swept)["warm"] is False
    cold, warm = swept.samples[0].placement, swept.samples[2].placement
    assert warm["pairs_hit"] == warm["pairs"]
    assert cold["uploads"] > 0 == warm["uploads"]


def test_a_cache_of_no_size_is_reported_as_asked(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    plan = _plan(tiny_moe, tiny_draft, Sweep(("spac",), (0,)), dataset=write_conversations(tmp_path, n=1))
    rows, recorder = run(replace(plan, repetitions=1))
    record = as_dict(rows[-1])
    assert (record["policy"], record["cache_ratio"], record["cache_slots"]) == ("spac", 0, 0)
    assert record["hit_rate_pairs"] is None
    assert any("off" in note for note in recorder.notes)


def test_the_policy_works_in_synthetic_tests(tiny_moe: Path, tiny_draft: Path) -> None:
    rows, _ = run(_plan(tiny_moe, tiny_draft, Sweep(("lru",), (1,)), n_prompt=24, n_gen=36))
    by_test = {(row.test, row.policy): row for row in rows}
    decoding = by_test["tg36", "lru"]
    assert (decoding.cache.hit_rate_pairs or 0) > 0.9
    counted = [sample.placement for sample in decoding.samples]
    assert [counters and counters["steps"] for counters in counted] == [16, 16, 4] * 2
    prefill = by_test["pp24", "lru"]
    assert prefill.cache.hit_rate_pairs is None
    assert all(sample.prefill_placement is not None for sample in prefill.samples)
