"""Measures what the policy's cost model needs (MoE-SpAc, Appendix C.1), on a fixed text with the real model and cache.

These are the times of an expert on the CPU and on the device by its tokens, of moving one and of drafting a token, the
shares r_c and r_g of the policy's utilities, steps with the cache and without, and prompts by each path.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import Residency
from moeedge.hardware.devices import ResolvedDevice
from moeedge.llama.context import Context
from moeedge.llama.sequence import Cancelled
from moeedge.native.abi import DevicePath, Phase, PrefillPath
from moeedge.native.cache import ExpertCache
from moeedge.policies.cost_model import CostModel, fit_side, share_curves
from moeedge.policies.registry import make_policy
from moeedge.run import Run, rotated, seconds_of, within
from moeedge.scheduler.calibration import Calibration, calibration_file, keep, read_measurement
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.driver import StepDriver
from moeedge.scheduler.native_io import CacheStore, RoutingReader, cache_shape

SAMPLE_TEXT = """\
The harbour was quiet in the early morning. Two boats had come in before sunrise, and their crews were sorting the catch
into crates: herring, mackerel, a few flat fish. "How many crates did we fill yesterday?" asked the younger one.
"Thirty-one, and four of those were sold on the quay," said the other. So 31 - 4 = 27 crates had gone to the market.

def total_weight(crates: list[float], lost: int = 0) -> float:
    \"\"\"Sum of the weights in kilograms, without the lightest `lost` crates.\"\"\"
    return sum(sorted(crates)[lost:])

| day | boats | crates | price |
| Monday | 2 | 31 | 12.50 |
| Tuesday | 3 | 44 | 11.80 |

In summary, the prices fell when more boats came in, and they rose again as soon as a storm kept the fleet at home. What
would you advise the crews to do next week, and why? First, they could agree on who goes out on which day.
"""
_PROMPT_TOKENS = 48  # before every measured batch
_STEPS = 12  # that the policy learns from and is judged by
_BATCHES = (1, 2, 4, 9, 16)
_REPETITIONS = 4  # the first one warms up
_PREFILL_TOKENS = 256
_PREFILL_TOKENS_MIN = 96
_PREFILL_REPETITIONS = 3
CONTEXT_MIN = 96  # tokens; in a smaller context there is no room to measure
_MIN_TIMED_BLOCKS = 12  # blocks with an exact time on the device that suffice without the others
_FILLS = 4  # parts in which transfers are timed; the fastest counts
_READERS = (1, 2, 3)  # threads that read the model's file; more take the CPU's memory bandwidth without a faster link
_READERS_GAIN = 0.9  # of the time with fewer readers, which more of them must beat
_DRAIN_S = 0.3
_CPU_SHARE_MIN = 0.25  # of the blocks: with fewer the policy has loaded nearly all that the text needs
_STREAM_S = 10.0  # limit of a prompt on the CPU where it is compared with streaming
_PART_LIMITS_S = {"steps": 0.7, "batches": 1.4, "prefill": 0.7}  # after which a part is cut short


def calibrate(
    target: Context,
    draft: Context | None,
    cache: ExpertCache,
    config: PlacementConfig,
    gamma: int,
    device: ResolvedDevice,
    run: Run,
) -> Calibration | None:
    """Reads what an earlier run measured under the same conditions, or else measures, and keeps it for the next run.

    None where measuring is switched off (config.calibrate) or the context is too small. Raises Cancelled where `run`
    is. Leaves KV caches and slots empty.
    """
    find_file = partial(calibration_file, target, cache, config, gamma, device)
    calibration = None if config.measure_anew else read_measurement(Calibration, find_file)
    if calibration is None:
        if not config.calibrate or target.n_ctx < CONTEXT_MIN:
            return None
        text = f"Measuring how long an expert takes on the CPU and on {device.label}: once, for some seconds."
        run.say(text)
        calibration = keep(_Measuring(target, cache, config, gamma, run.cancelled).measure(draft), find_file)
    if (units := calibration.units) is None:
        return calibration
    # an emulated link catches up with what a busy machine delayed, which a short measurement mistakes for speed
    least_s = float(cache.groups()[2].mean()) / (device.link_bytes_per_s or math.inf) + device.latency_us * 1e-6
    return replace(calibration, units=replace(units, transfer_expert_s=max(units.transfer_expert_s, least_s)))


class _Measuring:
    """One measurement, about 3 s on a small model: a text goes through the target, of CONTEXT_MIN tokens or more."""

    def __init__(
        self, target: Context, cache: ExpertCache, config: PlacementConfig, gamma: int, cancelled: Callable[[], bool]
    ) -> None:
        assert target.sensor is not None
        self._target, self._cache, self._sensor = target, cache, target.sensor
        self._cancelled, self._start_s = cancelled, time.perf_counter()
        self._store, self._cap = CacheStore(cache), config.utility_cap
        policy = make_policy(config.policy, cache_shape(cache), config.policy_config(gamma=gamma))
        self._driver = StepDriver(policy, self._store)
        # one way to compute small batches where the device is the host, or where one was asked for; else all compete
        only = DevicePath.PAIRS if config.device_path is None and cache.info.is_host else config.device_path
        self._device_paths = tuple(DevicePath) if only is None else (only,)
        self._n_asked = gamma + 1
        self.n_verified = min(self._n_asked, target.n_ctx // 4)
        self._records: dict[DevicePath, list[NDArray[np.void]]] = defaultdict(list)
        text = target.model.tokenize(SAMPLE_TEXT)
        self.tokens = (text * (1 + target.n_ctx // len(text)))[: target.n_ctx]
        self._n_prompt = min(_PROMPT_TOKENS, target.n_ctx // 4)
        target.clear()
        cache.attach(self._sensor)

    def measure(self, draft: Context | None) -> Calibration:
        """All figures; leaves KV caches and slots empty, and the cache detached, with the fastest path."""
        try:
            transfer_s, n_readers = self.time_transfers()
            self.learn()
            paths_s, plain_step_s = self.time_batches()
            path = min(paths_s, key=lambda path: paths_s[path][self.n_verified])
            self._cache.set_device_path(path)
            prefill_ts = self.time_prefill(plain_step_s[max(plain_step_s)] / max(plain_step_s))
            split_s = paths_s[path]
            if self._cpu_share() < _CPU_SHARE_MIN:
                self._forget_half()
                split_s = self.time_batches()[0][path]  # of the blocks that `cost_model` reads
                self._cache.set_device_path(path)
        finally:
            self._cache.set_timing(False)
            self._cache.detach()
            self._cache.clear()
            self._target.clear()
            self._sensor.read_counts()
        draft_s = self.time_draft(draft) if draft is not None else 0.0
        return Calibration(
            units=self.cost_model(transfer_s, draft_s, split_s, path),
            step_s=paths_s[path],
            plain_step_s=plain_step_s,
            prefill_ts=prefill_ts,
            n_tokens=self._n_asked,  # may be more than fit
            seconds=time.perf_counter() - self._start_s,
            n_readers=n_readers,
            device_path_s={path: times_s[self.n_verified] for path, times_s in paths_s.items()},
        )

    def check(self) -> None:
        """Raises Cancelled where the caller wants no measurement any more."""
        if self._cancelled():
            raise Cancelled

    def time_transfers(self) -> tuple[float, int]:
        """Fills the slots; seconds per transfer, 0 without one, and reading threads, the fewest that are fast."""
        group = self._cache.groups()[0]
        absent = np.argwhere((self._cache.residency() == 0) & (group >= 0)[:, None]).astype(np.int32)
        uploads = absent[np.random.default_rng(0).permutation(len(absent))[: self._cache.info.n_slots]]
        times_s = [self._time_uploads(uploads)]  # pages of file and device are cold: not the lasting speed
        self._cache.clear()
        n_max = 1 if self._cache.info.is_host else max(1, (os.cpu_count() or 1) // 2)
        readers = [n for n in _READERS if n <= n_max]
        times: dict[int, list[float]] = {n: [] for n in readers}
        times[1] += times_s
        order = [n for turn in range(_FILLS) for n in rotated(readers, turn)]
        for n_readers, part in zip(order, np.array_split(uploads, len(order)), strict=True):
            self._cache.set_readers(n_readers)
            times[n_readers].append(self._time_uploads(part))
        best = {n: min((time_s for time_s in of_n if time_s > 0), default=0.0) for n, of_n in times.items()}
        chosen = fewest_readers(best)
        self._cache.set_readers(chosen)
        return best[chosen], chosen

    def _time_uploads(self, uploads: NDArray[np.int32]) -> float:
        self.check()
        before = self._cache.stats()
        self._store.push_uploads(uploads)
        self._store.drain(_DRAIN_S, _DRAIN_S)
        after = self._cache.stats()
        moved = after.uploads - before.uploads
        return (after.transfer_s - before.transfer_s) / moved if moved else 0.0

    def learn(self) -> None:
        """Lets the policy see verifications of the text and act; sets the shares by its utilities, r_c and r_g."""
        reader = RoutingReader(self._sensor)
        utilities, activations = [], []
        size = max(2, self.n_verified)
        prompt = self.tokens[: self._n_prompt]
        self._target.decode(prompt, phase=Phase.PREFILL, logits="last")
        for piece in reader.prefill(self._sensor.read_counts(), prompt):
            self._driver.observe(piece)
        for _ in within(_PART_LIMITS_S["steps"], range(_STEPS), at_least=3):
            self.check()
            first = self._target.n_past
            batch = self.tokens[first : first + size]
            if len(batch) < size:
                break
            utility = self._driver.plan_draft(batch).utility.copy()
            self._driver.push()
            self._cache.drain(_DRAIN_S)
            self._target.decode(batch, phase=Phase.VERIFY, logits="all")
            counts = self._sensor.read_counts()
            utilities.append(utility)
            activations.append(counts.copy())
            self._driver.observe(reader.verification(counts, batch, size - 1))
        self._r_c, self._r_g = share_curves(self._cap, np.array(utilities), np.array(activations))
        self._store.push_uploads(np.zeros((0, 2), dtype=np.int32))
        self._store.drain(_DRAIN_S, _DRAIN_S)

    def time_batches(self) -> tuple[dict[DevicePath, dict[int, float]], dict[int, float]]:
        """Seconds of a decode by batch size, with the cache by device path and without it; the best of each counts.

        They take turns. Every other repetition times single blocks on the device, which makes its batches slower.
        """
        self._cache.blocks()
        sizes = sorted({n for n in (*_BATCHES, self.n_verified) if n <= self._target.n_ctx // 4})
        times: dict[tuple[int, DevicePath | None], list[float]] = defaultdict(list)
        ways = [None, *self._device_paths]
        # on a large model one repetition takes longer than warming up could distort it
        for repetition in within(_PART_LIMITS_S["batches"], range(_REPETITIONS)):
            self._cache.set_timing(repetition % 2 == 0)
            for n in sizes:
                for way in rotated(ways, repetition):
                    self._use_cache(way is not None)
                    if way is not None:
                        self._cache.set_device_path(way)
                    if self._target.model.can_roll_back and self._target.n_past >= self._n_prompt:
                        self._target.trim(self._n_prompt)
                    else:  # the memory cannot forget single tokens
                        self._target.clear()
                    times[n, way].append(self._time_decode(n, Phase.VERIFY if n > 1 else Phase.DECODE))
                    if way is not None:
                        self._records[way].append(self._cache.blocks())
        self._use_cache(True)
        best_s = {way: {n: min(times[n, way]) for n in sizes} for way in ways}
        return {path: best_s[path] for path in self._device_paths}, best_s[None]

    def _cpu_share(self) -> float:
        """Share of the blocks on the device of which the CPU computed a part."""
        records = np.concatenate([part for path in self._records.values() for part in path])
        return float((records["unique_cpu"] > 0).mean()) if records.size else 1.0

    def _forget_half(self) -> None:
        """Leaves every second resident expert in the slots, and no record of a block."""
        self._records.clear()
        resident = np.argwhere(self._cache.residency() == Residency.RESIDENT).astype(np.int32)
        self._cache.clear()
        self._store.push_uploads(resident[::2])
        self._store.drain(_DRAIN_S, _DRAIN_S)

    def _use_cache(self, use: bool) -> None:
        self._cache.detach()
        if use:
            self._cache.attach(self._sensor)

    def _time_decode(self, n: int, phase: Phase) -> float:
        self.check()
        tokens = self.tokens[self._target.n_past :][:n]
        return seconds_of(partial(self._target.decode, tokens, phase=phase, logits="all" if n <= 64 else "last"))

    def time_prefill(self, token_s: float) -> dict[PrefillPath, float]:
        """Tokens/s of a prompt by path; empty without room for one. token_s: of a small batch, limits its length."""
        prefill_paths = [PrefillPath.RESIDENT, PrefillPath.CPU]
        limit_s, max_tokens = _PART_LIMITS_S["prefill"], _PREFILL_TOKENS
        if self._cache.info.n_stage >= 2:
            # moving all experts takes as long for a short prompt as for a full graph: only the latter is comparable
            prefill_paths.insert(0, PrefillPath.STREAM)
            limit_s, max_tokens = _STREAM_S, self._target.n_ubatch
        n_affordable = min(max(int(limit_s / max(token_s, 1e-9)), _PREFILL_TOKENS_MIN), max_tokens)
        n = min(n_affordable, self._target.n_ubatch, self._target.n_ctx)
        if n <= 64:
            return {}
        times: dict[PrefillPath, list[float]] = defaultdict(list)
        for repetition in within(_PART_LIMITS_S["prefill"], range(_PREFILL_REPETITIONS)):
            for path in rotated(prefill_paths, repetition):
                self._cache.set_prefill(path, min(n, 65))
                # a token between: llama.cpp would reuse its last graph, on the last path, for a batch of the same size
                self._target.clear()
                self._target.decode(self.tokens[:1], phase=Phase.PREFILL, logits="last")
                self._target.clear()
                times[path].append(self._time_decode(n, Phase.PREFILL))
        self._cache.set_prefill(PrefillPath.CPU, 65)
        return {path: n / min(times_s) for path, times_s in times.items()}

    def time_draft(self, draft: Context) -> float:
        """Median seconds that the draft model takes for a token."""
        n = min(8, draft.n_ctx // 4)
        tokens = [token for token in self.tokens if token < draft.model.info.n_vocab]
        draft.clear()
        draft.decode(tokens[:n], phase=Phase.DRAFT, logits="none")
        times = []
        for token in tokens[n : 2 * n]:
            self.check()
            times.append(seconds_of(partial(draft.decode, [token], phase=Phase.DRAFT)))
        draft.clear()
        return median(times)

    def cost_model(
        self, transfer_s: float, draft_s: float, step_s: dict[int, float], path: DevicePath
    ) -> CostModel | None:
        """The constants of the balancer; None where the backend split no block."""
        records = np.concatenate(self._records[path])
        records = records[(records["pairs_device"] > 0) & (records["n_tokens"] <= max(_BATCHES))]
        if records.size == 0:
            return None
        cpu, device = (
            fit_side(part["n_tokens"], part[f"unique_{side}"], part[f"pairs_{side}"], part[f"{side}_ns"] * 1e-9)
            for side, part in (("cpu", records), ("device", records if self._cache.info.is_host else _timed(records)))
        )
        if cpu is None or device is None:
            return None
        n_layers, same = len(self._target.model.host_expert_layers), records["n_tokens"] == self.n_verified
        chosen = records[same] if same.any() else records
        experts_s = float(np.median(np.maximum(chosen["cpu_ns"], chosen["device_ns"]))) * 1e-9
        return CostModel(
            cpu_expert_s=cpu.curve(),
            device_expert_s=device.curve(),
            transfer_expert_s=transfer_s,
            draft_token_s=draft_s,
            block_overhead_s=float(np.median(records["partition_ns"])) * 1e-9 + device.fixed_s,
            layer_rest_s=max(0.0, step_s[self.n_verified] / n_layers - experts_s),
            r_c=self._r_c,
            r_g=self._r_g,
        )


def fewest_readers(seconds: dict[int, float]) -> int:
    """The number of threads to read with, by seconds per transfer; 0 s: not measured."""
    chosen = 1
    for n in sorted(seconds):
        if 0 < seconds[n] < _READERS_GAIN * seconds[chosen]:
            chosen = n
    return chosen


def _timed(records: NDArray[np.void]) -> NDArray[np.void]:
    """Block records with an exact device time; all of them where those are too few.

    A GPU's time ends when the CPU, its own part done, asks for it: it is exact only where the CPU had to wait.
    """
    exact = records[records["wait_ns"] > 0.1 * records["device_ns"]]
    return exact if len(exact) >= _MIN_TIMED_BLOCKS else records
