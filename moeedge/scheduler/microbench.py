"""The measuring run of calibration.py: a fixed text through the target, with the cache and without."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from moeedge.llama.context import Context
from moeedge.native.abi import Phase, PrefillPath
from moeedge.native.cache import ExpertCache
from moeedge.policies.base import Policy
from moeedge.policies.cost_model import CostModel, ShareCurves, fit_side
from moeedge.scheduler.routing_reader import RoutingReader

_TEXT = """\
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
_PROMPT_TOKENS = 48  # in front of every measured batch
_STEPS = 12  # that the policy learns from and is judged by
_BATCHES = (1, 2, 4, 9, 16)
_REPETITIONS = 4  # the first one warms up
_PREFILL_TOKENS = 256
_PREFILL_TOKENS_MIN = 96
_PREFILL_REPETITIONS = 3
CONTEXT_MIN = 96  # tokens; in a smaller context there is no room to measure
_TIMED_MIN = 12  # blocks whose time on the device is known, to do without the others
_FILLS = 4  # transfers are timed in so many parts, the best of which counts
_DRAIN_S = 0.3
_STREAM_S = 10.0  # what a prompt may take on the CPU where it is compared with streaming
_SHARES_S = {"steps": 0.7, "batches": 1.4, "prefill": 0.7}  # seconds that a part may take before it is cut short


@dataclass(frozen=True)
class Measured:
    """See calibration.Calibration."""

    units: CostModel | None
    step_s: dict[int, float]
    plain_step_s: dict[int, float]
    prefill_ts: dict[str, float]
    n_verified: int
    seconds: float


def measure(
    target: Context, draft: Context | None, cache: ExpertCache, policy: Policy, *, cap: int, n_verified: int
) -> Measured | None:
    """Measures within about 3 s on a small model; None where the context is too small for it.

    policy: a fresh one, whose utilities are judged. Leaves KV caches and slots empty, and the cache detached.
    """
    if target.n_ctx < CONTEXT_MIN or target.sensor is None:
        return None
    start_s = time.perf_counter()
    run = _Run(target, cache, policy, n_verified)
    try:
        transfer_s = run.fill()
        run.learn(cap)
        step_s, plain_step_s = run.time_batches()
        prefill_ts = run.time_prefill(plain_step_s[max(plain_step_s)] / max(plain_step_s))
    finally:
        run.leave()
    draft_s = _time_draft(draft, run.tokens) if draft is not None else 0.0
    return Measured(
        units=run.units(transfer_s, draft_s, step_s),
        step_s=step_s,
        plain_step_s=plain_step_s,
        prefill_ts=prefill_ts,
        n_verified=n_verified,
        seconds=time.perf_counter() - start_s,
    )


class _Run:
    def __init__(self, target: Context, cache: ExpertCache, policy: Policy, n_verified: int) -> None:
        assert target.sensor is not None
        self.target, self.cache, self.policy, self.sensor = target, cache, policy, target.sensor
        self.n_verified = min(n_verified, target.n_ctx // 4)
        text = target.model.tokenize(_TEXT)
        self.tokens = (text * (1 + target.n_ctx // len(text)))[: target.n_ctx]
        self.n_prompt = min(_PROMPT_TOKENS, target.n_ctx // 4)
        target.clear()
        cache.attach(self.sensor)

    def leave(self) -> None:
        """As it was before, but for what was measured."""
        self.cache.detach()
        self.cache.clear()
        self.target.clear()
        self.sensor.read_counts()

    def fill(self) -> float:
        """Fills the slots with experts of all layers; seconds per transfer, 0 without one."""
        resident = self.cache.residency()
        group = self.cache.groups()[0]
        absent = np.argwhere((resident == 0) & (group >= 0)[:, None]).astype(np.int32)
        wanted = absent[np.random.default_rng(0).permutation(len(absent))[: self.cache.info.n_slots]]
        times_s = [self._time_move(wanted)]  # cold pages in the file and on the device: not what lasts
        self.cache.clear()
        times_s += [self._time_move(part) for part in np.array_split(wanted, _FILLS)]
        return min((one_s for one_s in times_s if one_s > 0), default=0.0)

    def _time_move(self, uploads: NDArray[np.int32]) -> float:
        """Seconds per transfer; 0 without one."""
        before = self.cache.stats()
        self._move(uploads)
        after = self.cache.stats()
        moved = after.uploads - before.uploads
        return (after.transfer_s - before.transfer_s) / moved if moved else 0.0

    def _move(self, uploads: NDArray[np.int32]) -> None:
        """Moves what of `uploads` there is time for, and lets nothing be queued after."""
        self._plan(uploads)
        if not self.cache.drain(_DRAIN_S):
            self._plan(uploads[:0])
            self.cache.drain(_DRAIN_S)

    def _plan(self, uploads: NDArray[np.int32]) -> None:
        priority = np.ones(len(uploads), dtype=np.uint8)
        self.cache.plan(uploads, priority, np.zeros((0, 2), np.int32), np.zeros(0, np.float32))

    def learn(self, cap: int) -> None:
        """Lets the policy see verifications of the text and act; how its utilities would have split each of them."""
        watcher = RoutingReader(self.sensor)
        self.shares = shares = ShareCurves(cap)
        size = max(2, self.n_verified)
        prompt = self.tokens[: self.n_prompt]
        self.target.decode(prompt, phase=Phase.PREFILL, logits="last")
        for piece in watcher.prefill(self.sensor.read_counts(), prompt):
            self.policy.observe(piece)
        start_s = time.perf_counter()
        for step in range(_STEPS):
            first = self.target.n_past
            batch = self.tokens[first : first + size]
            if len(batch) < size or (step >= 3 and time.perf_counter() - start_s > _SHARES_S["steps"]):
                break
            plan = self.policy.plan(self.cache.residency(), batch)
            utility = plan.utility.copy()
            self.cache.plan(plan.uploads, plan.priority, plan.victims, plan.victim_utility)
            self.cache.drain(_DRAIN_S)
            self.target.decode(batch, phase=Phase.VERIFY, logits="all")
            counts = self.sensor.read_counts()
            shares.add(utility, counts)
            self.policy.observe(watcher.verification(counts, batch, size - 1))
        self._move(np.zeros((0, 2), np.int32))

    def time_batches(self) -> tuple[dict[int, float], dict[int, float]]:
        """Seconds of a decode by batch size, with the cache and without, taking turns; the best of each counts."""
        self.cache.blocks()
        sizes = sorted({n for n in (*_BATCHES, self.n_verified) if n <= self.target.n_ctx // 4})
        times: dict[tuple[int, bool], list[float]] = defaultdict(list)
        start_s = time.perf_counter()
        for repetition in range(_REPETITIONS):
            for n in sizes:
                for with_cache in (True, False) if repetition % 2 else (False, True):
                    self._use_cache(with_cache)
                    self._rewind()
                    times[n, with_cache].append(self._time_decode(n, Phase.VERIFY if n > 1 else Phase.DECODE))
            if time.perf_counter() - start_s > _SHARES_S["batches"]:
                break  # on a large model one repetition takes longer than warming up could distort it
        self._use_cache(True)
        return ({n: min(times[n, True]) for n in sizes}, {n: min(times[n, False]) for n in sizes})

    def _use_cache(self, wanted: bool) -> None:
        self.cache.detach()
        if wanted:
            self.cache.attach(self.sensor)

    def _rewind(self) -> None:
        """To the end of the prompt, or, where the memory cannot forget single tokens, to nothing."""
        if self.target.model.can_roll_back and self.target.n_past >= self.n_prompt:
            self.target.trim(self.n_prompt)
        else:
            self.target.clear()

    def _forget_graph(self) -> None:
        """Empties the context and has llama.cpp plan the next batch anew.

        It would reuse its last graph for a batch of the same size, on the devices that took it under the last path.
        """
        self.target.clear()
        self.target.decode(self.tokens[:1], phase=Phase.PREFILL, logits="last")
        self.target.clear()

    def _time_decode(self, n: int, phase: Phase) -> float:
        first = self.target.n_past
        start_s = time.perf_counter()
        self.target.decode(self.tokens[first : first + n], phase=phase, logits="all" if n <= 64 else "last")
        return time.perf_counter() - start_s

    def time_prefill(self, token_s: float) -> dict[str, float]:
        """Tokens/s of a prompt by path, taking turns; empty where the context has no room for one.

        token_s: what a token takes in a small batch, to keep the prompt short where that is long.
        """
        chosen = {"cpu": PrefillPath.CPU, "resident": PrefillPath.RESIDENT}
        share_s, most = _SHARES_S["prefill"], _PREFILL_TOKENS
        if self.cache.info.n_stage >= 2:
            # moving all experts takes as long for a short prompt as for a whole graph: only the latter compares
            chosen["stream"] = PrefillPath.STREAM
            share_s, most = _STREAM_S, self.target.n_ubatch
        wanted = min(max(int(share_s / max(token_s, 1e-9)), _PREFILL_TOKENS_MIN), most)
        n = min(wanted, self.target.n_ubatch, self.target.n_ctx)
        if n <= 64:
            return {}
        times: dict[str, list[float]] = defaultdict(list)
        start_s = time.perf_counter()
        for repetition in range(_PREFILL_REPETITIONS):
            for name in list(chosen) if repetition % 2 else reversed(list(chosen)):
                self.cache.set_prefill(chosen[name], min(n, 65))
                self._forget_graph()
                times[name].append(self._time_decode(n, Phase.PREFILL))
            if time.perf_counter() - start_s > _SHARES_S["prefill"]:
                break
        self.cache.set_prefill(PrefillPath.CPU, 65)
        return {name: n / min(taken) for name, taken in times.items()}

    def units(self, transfer_s: float, draft_s: float, step_s: dict[int, float]) -> CostModel | None:
        """The constants of the balancer; None where the backend split no block."""
        records = self.cache.blocks()
        records = records[(records["pairs_device"] > 0) & (records["n_tokens"] <= max(_BATCHES))]
        if records.size == 0:
            return None
        sides = [
            fit_side(part["n_tokens"], part[f"unique_{side}"], part[f"pairs_{side}"], part[f"{side}_ns"] * 1e-9)
            for side, part in (("cpu", records), ("device", records if self.cache.info.is_host else _timed(records)))
        ]
        cpu, device = sides
        if cpu is None or device is None:
            return None
        n_layers = self.target.model.info.n_expert_layers
        chosen = records[records["n_tokens"] == self.n_verified]
        chosen = chosen if chosen.size else records
        experts_s = float(np.median(np.maximum(chosen["cpu_ns"], chosen["device_ns"]))) * 1e-9
        return CostModel(
            cpu_expert_s=cpu.curve(),
            device_expert_s=device.curve(),
            transfer_expert_s=transfer_s,
            draft_token_s=draft_s,
            block_overhead_s=float(np.median(records["partition_ns"])) * 1e-9 + device.fixed_s,
            layer_rest_s=max(0.0, step_s[self.n_verified] / n_layers - experts_s),
            r_c=self.shares.r_c,
            r_g=self.shares.r_g,
        )


def _timed(records: NDArray[np.void]) -> NDArray[np.void]:
    """Those that tell what the device took, which is at most the time that they state.

    A GPU is asked when the CPU's part is done. Where that meant waiting, it had worked until then; and for some blocks
    the backend waits before it begins with the CPU's part. The emulated device notes the time itself.
    """
    exact = records[records["wait_ns"] > 0.1 * records["device_ns"]]
    return exact if len(exact) >= _TIMED_MIN else records


def _time_draft(draft: Context, tokens: Sequence[int]) -> float:
    """Median seconds that the draft model takes for a token."""
    n = min(8, draft.n_ctx // 4)
    n_vocab = draft.model.info.n_vocab
    known = [token for token in tokens if token < n_vocab]
    draft.clear()
    draft.decode(known[:n], phase=Phase.DRAFT, logits="none")
    times = []
    for token in known[n : 2 * n]:
        start_s = time.perf_counter()
        draft.decode([token], phase=Phase.DRAFT)
        times.append(time.perf_counter() - start_s)
    draft.clear()
    return median(times)
