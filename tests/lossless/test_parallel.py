"""Texts that are decoded together: each answer equals its single greedy run by stock llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.engine.answer import ParallelGeneration
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.llama.context import Context
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.sequence import BatchPart
from moeedge.native.abi import DevicePath
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.governor import GAMMA_MAX
from moeedge.scheduler.stats import StepRecord
from tests.conftest import TinyFactory
from tests.support.cases import ATTENTION_CASES, case_model
from tests.support.counting import DEVICE, CountingDevice
from tests.support.hybrid import assert_greedy, hit_stats, hybrid_config
from tests.support.sessions import GREEDY, answered
from tests.support.stock import StockContext

N_PREDICT = 40
RNG = np.random.default_rng(9)
# of different lengths; copies in some, so that the n-gram lookup drafts in some texts and not in others
PROMPTS = [
    (RNG.integers(0, 256, n).tolist() * n_copies)[: n * n_copies]
    for n, n_copies in ((20, 1), (7, 3), (33, 1), (5, 4), (12, 2))
]
DRAFTS = [None, ("model", 1), ("model", 4), ("model", 8), ("model", "auto"), ("ngram", 4)]
QUICK = (None, ("model", 4), ("ngram", 4))  # with every model
QUICK_PAIRS = [(case, ("model", 4)) for case in ("gpt-oss", "deepseek2")]  # the other pairs are slow


def config(target: Path, speculation: tuple[str, Any] | None, draft: Path, **options: Any) -> EngineConfig:
    kind, gamma = speculation or ("none", 0)
    if gamma == "auto":
        gamma, options = GAMMA_MAX, options | {"auto_gamma": True}
    source: Any = {"none": None, "ngram": "ngram", "model": draft}[kind]
    fields: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_parallel": 3, "device": "none"} | options
    return EngineConfig(model=target, draft=source, gamma=gamma, **fields)


def answer_all(session: Session, prompts: list[list[int]], **options: Any) -> ParallelGeneration:
    """Runs all answers to their end; the records of a text are its tokens."""
    fields: dict[str, Any] = {"n_predict": N_PREDICT, "sampling": GREEDY} | options
    generation = session.generate_parallel(prompts, **fields)
    emitted: list[list[int]] = [[] for _ in prompts]
    for index, record in generation:
        emitted[index] += record.tokens
    assert emitted == [answer.tokens for answer in generation.answers]
    return generation


def check(
    stock: StockContext, prompts: list[list[int]], generation: ParallelGeneration, batches: list[Batch] | None = None
) -> None:
    """Every answer is stock's greedy one, or differs where stock's own logits nearly tie.

    Texts that share a KV cache move each other's logits, in stock too: with the batches of the engine an answer may
    also be the one that stock finds by the very same batches.
    """
    alike: list[list[int]] | None = None
    for i, (prompt, answer) in enumerate(zip(prompts, generation.answers, strict=True)):
        expected = stock.answer(prompt, len(answer.tokens))
        if batches is not None and answer.tokens != expected:
            alike = alike or _decoded_alike(stock, prompts, batches)
            if answer.tokens == alike[i][: len(answer.tokens)]:
                continue
        assert_greedy(stock, prompt, answer.tokens, expected, f"text {i}")


Batch = list[tuple[int, int, list[int]]]  # sequence, first position and tokens of each part


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches that contexts of several sequences have decoded."""
    found: list[Batch] = []
    decode = Context._decode_batch

    def recorded(self: Context, parts: Sequence[BatchPart], *arguments: Any) -> Any:
        if self.n_parallel > 1:
            found.append([(part.sequence.index, len(part.sequence.tokens), list(part.tokens)) for part in parts])
        return decode(self, parts, *arguments)

    monkeypatch.setattr(Context, "_decode_batch", recorded)
    return found


def _decoded_alike(stock: StockContext, prompts: list[list[int]], batches: list[Batch]) -> list[list[int]]:
    """The most probable token after each position of each text, by stock with the same batches, from its prompt's end.

    What follows rejected drafts is overwritten by what follows the tokens in their place.
    """
    found: list[dict[int, int]] = [{} for _ in prompts]
    text_of: dict[int, int] = {}
    with StockContext(stock.path, n_ctx=768, n_seq_max=3, kv_unified=True) as other:
        for parts in batches:
            for sequence, position, tokens in parts:
                if position == 0:
                    text_of[sequence] = prompts.index(tokens)
                other.trim(position, sequence)
            rows = other.decode_parts(parts)
            for (sequence, position, tokens), own in zip(parts, rows, strict=True):
                found[text_of[sequence]] |= {
                    position + j: int(row.argmax()) for j, row in enumerate(own[: len(tokens)])
                }
    return [
        [token for position, token in sorted(each.items()) if position >= len(prompt) - 1]
        for prompt, each in zip(prompts, found, strict=True)
    ]


@pytest.mark.parametrize(
    ("case", "speculation"),
    [
        pytest.param(
            case,
            speculation,
            id=f"{case}-{'-'.join(map(str, speculation)) if speculation else 'plain'}",
            marks=() if case == "qwen3moe" or (case, speculation) in QUICK_PAIRS else pytest.mark.slow,
        )
        for case in ATTENTION_CASES
        for speculation in (DRAFTS if case == "qwen3moe" else QUICK)
    ],
)
def test_each_text_is_stocks(
    case: str, speculation: tuple[str, Any] | None, tiny: TinyFactory, tiny_draft: Path, batches: list[Batch]
) -> None:
    """Five texts on three sequences: two wait, and take the sequences of those that end."""
    path = case_model(tiny, case)
    with StockContext(path, n_ctx=512) as stock, Session.open(config(path, speculation, tiny_draft)) as session:
        generation = answer_all(session, PROMPTS)
        assert all(len(answer.tokens) == N_PREDICT for answer in generation.answers)
        assert {answer.stop_reason for answer in generation.answers} == {"length"}
        check(stock, PROMPTS, generation, batches)
        assert {2, 3} <= set(generation.of_texts) <= {1, 2, 3}
        assert generation.stats.generated_tokens == len(PROMPTS) * (N_PREDICT - 1)


@pytest.mark.parametrize(
    "policy", ["spac", "sp-moe-prefetch", *(pytest.param(p, marks=pytest.mark.slow) for p in ("lru", "fate"))]
)
@pytest.mark.parametrize("gamma", [0, 4])
def test_with_a_cache(policy: str, gamma: int, many: Path, tiny_draft: Path, stock: StockContext) -> None:
    """Half of the experts on the emulated device; policies that read the draft's layers do without."""
    options = hybrid_config(many, tiny_draft, 0.5, gamma=gamma, policy=policy)
    with Session.open(replace(options, n_parallel=3)) as session:
        generation = answer_all(session, PROMPTS)
        check(stock, PROMPTS, generation)
        stats = hit_stats(session)
        assert stats.steps == generation.stats.steps
        info = session.info
        n_verified = sum(n * stats.steps + stats.drafted for n, stats in generation.of_texts.items())
        assert stats.pairs_hit < stats.pairs == n_verified * info.n_expert_layers * info.n_expert_used


@pytest.mark.parametrize("ratio", [None, 0.5])
def test_a_budget_caps_the_batch(ratio: float | None, many: Path, tiny_draft: Path, stock: StockContext) -> None:
    """The experts of all texts together keep to the budget; without drafts there is none."""
    options = replace(hybrid_config(many, tiny_draft, ratio or 0.0, gamma=4), n_parallel=3)
    options = replace(options, expert_budget=ExpertBudget(budget=6), device=options.device if ratio else "none")
    with Session.open(options) as session:
        records: list[StepRecord] = []
        session.observers.append(lambda record, _session: records.append(record))
        answer_all(session, PROMPTS)
        verified = [record for record in records if record.n_drafted]
        assert verified and max(record.n_verified for record in verified) > 5
        assert all(0 < record.experts_max <= 6 for record in verified)
        assert max(record.experts_natural for record in verified) > 6
        session.gamma = 0
        session.reset()
        check(stock, PROMPTS, answer_all(session, PROMPTS))


def test_a_long_text_among_short_ones(tiny: TinyFactory, tiny_draft: Path) -> None:
    """A sliding window that loses its oldest tokens, while others join and leave."""
    path = tiny("gpt-oss")
    prompts = [RNG.integers(0, 256, n).tolist() for n in (300, 10, 10, 200, 10)]
    options = config(path, ("model", 4), tiny_draft, n_ctx=512, n_ubatch=32)
    with StockContext(path, n_ctx=1024, n_batch=512) as stock, Session.open(options) as session:
        check(stock, prompts, answer_all(session, prompts, n_predict=80))


def test_a_batch_larger_than_a_graph(tiny: TinyFactory, tiny_draft: Path) -> None:
    """A step is verified in several graphs where it has more tokens than one may have."""
    path = tiny("gpt-oss")
    options = config(path, ("model", 8), tiny_draft, n_batch=16, n_ubatch=16, n_parallel=5)
    with StockContext(path, n_ctx=512) as stock, Session.open(options) as session:
        n_verified: list[int] = []
        session.observers.append(lambda record, _session: n_verified.append(record.n_verified))
        generation = answer_all(session, PROMPTS)
        assert max(n_verified) > 32
        check(stock, PROMPTS, generation)


@pytest.mark.parametrize("gamma", [0, 8])
@pytest.mark.parametrize("path", list(DevicePath))
def test_next_to_a_gpu(path: DevicePath, gamma: int, many: Path, tiny_draft: Path, counting: CountingDevice) -> None:
    """Attention on the counting device, which executes as late as a GPU may; 4 or 36 tokens in a batch."""
    options = hybrid_config(many, tiny_draft, 0.5, gamma=gamma, device=DEVICE, device_path=path)
    with (
        StockContext(many, n_ctx=512, gpu=DEVICE, experts_on_cpu=True, n_gpu_layers=99) as stock,
        counting.late(),
        Session.open(replace(options, n_parallel=4, n_gpu_layers=99)) as session,
    ):
        generation = answer_all(session, PROMPTS, n_predict=24)
        hit_stats(session)
        check(stock, PROMPTS, generation)
    counting.check()


@pytest.mark.parametrize("gamma", [0, 4])
def test_experts_from_the_file(gamma: int, many: Path, tiny_draft: Path, stock: StockContext) -> None:
    """Slots in RAM for a third of the experts, of which a batch of three texts may need more than a layer has."""
    ram = expert_bytes(expert_tensors(many)[0]) // 3
    placement = PlacementConfig(calibrate=False, policy="lfu")
    with Session.open(config(many, ("model", gamma), tiny_draft, ram=ram, placement=placement)) as session:
        assert session.info.device == "RAM"
        generation = answer_all(session, PROMPTS)
        check(stock, PROMPTS, generation)
        stats = session.placement_stats()
        assert stats is not None and stats.failed == 0 and stats.evictions > 0


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_seeds_give_the_tokens_of_single_runs(kind: str, tiny: TinyFactory, tiny_draft: Path) -> None:
    """Each text draws its own random numbers, whatever the others do.

    A model of float32 that uses all of its experts: larger batches round otherwise, and turn no router around here.
    """
    path = tiny("qwen3moe", experts=4, used=4, expert_type="F32")
    samplings = [SamplingConfig(temperature=0.9, seed=seed) for seed in range(len(PROMPTS))]
    with Session.open(config(path, (kind, 4), tiny_draft)) as session:
        generation = answer_all(session, PROMPTS, sampling=samplings)
        for prompt, sampling, answer in zip(PROMPTS, samplings, generation.answers, strict=True):
            session.reset()
            alone = answered(session, prompt, N_PREDICT, sampling=sampling, ignore_eos=False)
            assert answer.tokens == alone.tokens and answer.stats.accepted == alone.stats.accepted
