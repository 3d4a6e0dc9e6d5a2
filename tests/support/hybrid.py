"""Hybrid runs: sessions and bare contexts with some of the experts on a device.

$MOEEDGE_TEST_DEVICE names the device as -dev takes it, for instance CUDA0; the emulated one unless it is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from moeedge.bench.quality import NEAR_TIE_GAP
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.hardware.devices import resolve
from moeedge.hardware.spec import DeviceSpec
from moeedge.llama import library
from moeedge.native import OffloadScope
from moeedge.native.cache import ExpertCache
from moeedge.scheduler.cache_governor import CacheChoice, CacheGovernor
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.stats import PlacementStats
from tests.support.experts import model_experts
from tests.support.greedy import BATCH, forced_rows, judge
from tests.support.sensed import sensed_context
from tests.support.sessions import answered
from tests.support.stock import StockContext

RATIOS = (0.0, 0.05, 0.17, 0.5, 1.0)
GAMMAS = (0, 1, 4, 8)
# a GPU's arithmetic differs more (TF32, fp16 accumulation), enough to turn a router's near-tie around now and then
GPU_GAP = 0.5  # logits of spread 4
GPU_DEPARTURES = 0.05  # of the tokens
ALL_LAYERS = 99
# the smallest ratio still gives every layer of the tiny models a slot
MANY_EXPERTS = 32


class AlternatingCache(CacheGovernor):
    """Three steps with the cache, three without."""

    @property
    def choice(self) -> CacheChoice:
        return CacheChoice(on=self._n_steps % 6 < 3, pays=self._n_steps % 12 < 6, gain=1.0)


class NeverPays(CacheGovernor):
    """Keeps the cache off."""

    @property
    def choice(self) -> CacheChoice:
        return CacheChoice(on=False, pays=False)


def device_under_test() -> str:
    """What the hybrid tests run on."""
    return os.environ.get("MOEEDGE_TEST_DEVICE") or "emulated:threads=1"


def on_cpu() -> bool:
    """Whether the device computes with the CPU's kernels, be it in another process."""
    return device_under_test().startswith(("emulated", "rpc://"))


def hybrid_config(
    target: Path, draft: Path | str | None, ratio: float, *, gamma: int = 8, device: str | None = None, **placement: Any
) -> EngineConfig:
    """A session's configuration with that share of the experts on the device; nothing is measured first."""
    return EngineConfig(
        model=target,
        draft=draft,  # type: ignore[arg-type]
        gamma=gamma,
        n_ctx=512,
        n_threads=1,
        device=device or device_under_test(),
        placement=PlacementConfig(cache_ratio=ratio, calibrate=False, **placement),
    )


def greedy_answer(session: Session, prompt: Sequence[int], n_predict: int) -> list[int]:
    """The answer's tokens, from an empty KV cache."""
    session.reset()
    return answered(session, prompt, n_predict).tokens


def assert_greedy(
    stock: StockContext, prompt: Sequence[int], tokens: list[int], expected: list[int], what: str
) -> None:
    """That `tokens` are stock's up to near-ties.

    Judged by a stock context: as close as its own batches scatter, or as the engine's rule for near-ties allows; on a
    GPU a little further, but seldom.
    """
    if tokens == expected:
        return
    assert len(tokens) == len(expected), f"{what}: {len(tokens)} tokens instead of {len(expected)}"
    verdict = judge(stock, prompt, tokens)
    limit = max(NEAR_TIE_GAP if on_cpu() else GPU_GAP, 2 * verdict.noise)
    worst = max(verdict.gaps.values(), default=0.0)
    n_most = len(tokens) if on_cpu() else int(GPU_DEPARTURES * len(tokens))
    if worst > limit and on_cpu():
        limit = max(limit, 2 * _layout_noise(stock, [*prompt, *tokens]))
    elif worst > limit or len(verdict.gaps) > n_most:  # as far and as often as stock on the device
        noise, n_departures = _device_noise(stock, prompt, tokens)
        limit, n_most = max(limit, 2 * noise), max(n_most, 2 * n_departures)
    assert verdict.gaps, f"{what}: the sequences differ, so stock must have seen a tie"
    assert worst <= limit, f"{what}: not greedy, {worst:.3g} below the best logit; noise {verdict.noise:.2g}"
    assert len(verdict.gaps) <= n_most, f"{what}: {len(verdict.gaps)} departures"


def assert_answers(
    session: Session, stock: StockContext, prompt: Sequence[int], n_predict: int, n_turns: int = 1, *, what: str = ""
) -> None:
    """That answers in turn, each from an empty KV cache, are stock's up to near-ties."""
    expected = stock.answer(prompt, n_predict)
    for turn in range(n_turns):
        assert_greedy(stock, prompt, greedy_answer(session, prompt, n_predict), expected, f"{what}, turn {turn}")


def hit_stats(session: Session) -> PlacementStats:
    """The figures of a cache that computed pairs, knew all blocks and was not lost."""
    stats = session.placement_stats()
    assert stats is not None, session.info.notes
    assert stats.pairs_hit > 0 and stats.blocks_unknown == 0 and not stats.lost
    return stats


def _layout_noise(stock: StockContext, tokens: Sequence[int]) -> float:
    """How far stock's logits with repacked weights are from stock's with plain ones, which a device has."""
    stock.trim(0)
    with StockContext(stock.path, n_ctx=stock.n_ctx, repack=not stock.repack) as other:
        return float(np.abs(stock.decode(tokens) - other.decode(tokens)).max())


def _device_noise(stock: StockContext, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[float, int]:
    """Stock with all layers on the device against stock: the farthest logits, and how often another one is the best.

    In batches of one token and of a verification, the larger of both.
    """
    rows = forced_rows(stock, prompt, tokens, 1)
    with stock_on_device(stock) as other:
        found = [forced_rows(other, prompt, tokens, batch) for batch in (1, BATCH)]
    n_departures = max(int((each.argmax(axis=1) != rows.argmax(axis=1)).sum()) for each in found)
    return max(float(np.abs(each - rows).max()) for each in found), n_departures


def stock_on_device(stock: StockContext) -> StockContext:
    """The same model with all layers on the device under test, a GPU."""
    return StockContext(stock.path, n_ctx=stock.n_ctx, gpu=device_under_test(), n_gpu_layers=ALL_LAYERS)


@contextmanager
def hybrid_context(
    path: Path,
    ratio: float,
    *,
    n_stage: int = 0,
    layers_per_pool: int = 0,
    device: str | None = None,
    experts_from: Path | None = None,
    **options: Any,
) -> Iterator[tuple[StockContext, ExpertCache]]:
    """A bare context and its expert cache, attached; the caller plans.

    layers_per_pool: layers that share slots, 0: all. experts_from: another model of the same shape, whose experts the
    device gets.
    """
    library.start()
    resolved = resolve(DeviceSpec.parse(device or device_under_test()), bundled=False)
    claims = OffloadScope.MOE if library.local_gpus() else OffloadScope.ALL
    context, sensor = sensed_context(path, claims, **options)
    with context:
        experts = model_experts(experts_from or path)
        layer_bytes = max(tensor.stride * tensor.n_experts for tensor in experts.tensors)
        config = experts.config(
            ratio,
            device=resolved.ggml_name,
            emulated_threads=resolved.threads or 1,
            n_stage=n_stage,
            pool_bytes_max=int(layers_per_pool * ratio * layer_bytes),
        )
        with ExpertCache(config) as cache:
            cache.attach(sensor)
            yield context, cache
            cache.detach()


class RandomPlans:
    """Plans that mean nothing: every expert that could be uploaded in random order, everything resident a victim."""

    def __init__(self, cache: ExpertCache, seed: int) -> None:
        groups = cache.groups()
        self._cache = cache
        self._layers = np.flatnonzero(groups[0] >= 0)
        self._rng = np.random.default_rng(seed)

    def push(self, n_uploads: int) -> None:
        """Pushes one plan of up to `n_uploads` uploads."""
        resident = self._cache.residency() != 0
        absent = np.argwhere(~resident)
        absent = absent[np.isin(absent[:, 0], self._layers)]
        uploads = self._rng.permutation(absent)[:n_uploads].astype(np.int32)
        victims = self._rng.permutation(np.argwhere(resident)).astype(np.int32)
        priority = np.sort(self._rng.integers(1, 5, len(uploads)))[::-1].astype(np.uint8)
        utility = np.sort(self._rng.random(len(victims))).astype(np.float32)
        self._cache.plan(uploads, priority, victims, utility)

    def fill(self) -> None:
        """Fills the free slots and waits for it."""
        self.push(1 << 20)
        self._cache.drain(30.0)


def random_prompt(n_tokens: int, seed: int) -> list[int]:
    """Bytes as tokens."""
    return np.random.default_rng(seed).integers(0, 256, n_tokens).tolist()
