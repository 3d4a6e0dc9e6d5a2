"""Measures how to divide a GPU's memory between whole layers and the expert cache, and opens sessions accordingly.

The fastest of three divisions is chosen, each measured in a session of its own: everything for the cache, as many whole
layers as fit without a cache (llama.cpp's --n-cpu-moe), and the one in between that `StepEstimate`, fitted to these
two, says is fastest. So no choice is slower than --n-cpu-moe by more than the noise of the measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from moeedge import native
from moeedge.engine.layer_choice import LayerChoice, LayerSplit, choice_file, is_marked, mark, read_choice
from moeedge.engine.loading import resolve_device, whole_model_fits
from moeedge.engine.session import Session
from moeedge.engine.types import ALL_ON_CPU, DEFAULT_GAMMA, DEFAULT_N_UBATCH, EngineConfig, SamplingConfig
from moeedge.errors import EngineError, ModelFileError, MoeedgeError
from moeedge.hardware import devices
from moeedge.hardware.devices import ResolvedDevice
from moeedge.llama import gguf_file
from moeedge.llama.gguf_file import most_whole_layers, whole_layers
from moeedge.llama.model import Model
from moeedge.native.abi import PrefillPath
from moeedge.native.cache import ExpertTensor
from moeedge.run import Level, Notification, Run, within
from moeedge.scheduler.calibration import keep
from moeedge.scheduler.microbench import CONTEXT_MIN, SAMPLE_TEXT
from moeedge.scheduler.opening import check_policy
from moeedge.scheduler.sizing import reserve_bytes

_GREEDY = SamplingConfig(temperature=0.0)
_WARM_UP_STEPS = 16  # that fill the cache
_STEPS = 32
_LIMIT_S = 10.0  # of one answer
_SLOWEST = 0.1  # share of the steps that are left out: another program had the processor
_WIDE_UBATCH = 2048  # tokens per graph, where prompts are streamed
_FASTER = 1.03  # times the prompts' speed with the usual graphs
_ATTEMPTS = 3  # with a layer less each, where llama.cpp finds no memory for so many


def open_session(config: EngineConfig, *, draft_model: Model | None = None, run: Run | None = None) -> Session:
    """Opens a session with the fastest division of a GPU between whole layers and cache; measures it on first use.

    As Session.open where there is nothing to choose: without a GPU, without experts, for a model that fits it, and with
    --cache-ratio, -ncmoe or --cpu-moe. draft_model: loaded already. Raises MoeedgeError with a hint.
    """
    check_policy(config.placement)
    device = resolve_device(config)
    if not has_choice(config, device):
        return Session.open(config, draft_model=draft_model, run=run)
    run, notes = run or Run(), list[str]()
    choice = None if config.placement.measure_anew else read_choice(config, device)
    if choice is None and config.placement.calibrate:
        about = f"Measuring how many layers to keep on {device.label}, with and without a cache, once for this model"
        run.say(f"{about}: this may take minutes.")
        # all steps have as many drafts, and the cache where it is measured; without a budget: the choice serves all
        placement = replace(config.placement, calibrate_later=False, governed=False)
        gamma = min(config.gamma, DEFAULT_GAMMA) if config.auto_gamma else config.gamma
        measured = replace(
            config,
            cpu_fallback=False,
            expert_budget=None,
            auto_gamma=False,
            gamma=gamma,
            draft_p_min=0.0,
            placement=placement,
        )
        choice = _Search(measured, device, draft_model, run).run()
        if choice is not None:
            choice = keep(choice, partial(choice_file, config, device))
    if choice is None:
        return Session.open(config, draft_model=draft_model, run=run)
    config = replace(config, placement=replace(config.placement, measure_anew=False))
    try:
        session = Session.open(choice.best.apply(config), draft_model=draft_model, run=run)
    except (EngineError, ModelFileError) as error:  # another program has taken the memory meanwhile
        session = Session.open(config, draft_model=draft_model, run=run)
        notes.append(f"{choice.best.n_whole} entire layers no longer fit {device.label}: {error.message}")
        notes += [] if choice.kept else [f"The layers are {choice.again}."]
    else:
        session.layer_choice = choice
        level = Level.NOTICE if choice.kept else Level.WARNING
        session.info.notes.append(Notification(choice.decision.sentence(), level))
    session.info.notes.extend(notes)
    return session


def has_choice(config: EngineConfig, device: ResolvedDevice) -> bool:
    """Whether `open_session` chooses the layers: a GPU that cannot hold the model, and no option that says them."""
    # where experts are loaded from the file, reading it would be measured
    if device.kind != "gpu" or device.loads_misses or config.mode != "moeedge" or config.n_gpu_layers == 0:
        return False
    placement = config.placement
    has_split = config.n_cpu_moe is not None or bool(config.load.overrides)
    if placement.cache_ratio is not None or placement.vram_bytes == 0 or has_split:
        return False
    n_gpus = sum(listed.kind == "GPU" for listed in native.devices())
    if device.llama_device == "auto" and n_gpus > 1:  # llama.cpp spreads the layers over all of them
        return False
    return bool(gguf_file.read_summary(config.model).expert_layers) and not whole_model_fits(config, device)


@dataclass(frozen=True)
class CachedSteps:
    step_s: float  # mean of a step
    hit_rate: float  # share of the (token, expert) pairs that the cache served; 0 without one


def time_steps(session: Session) -> CachedSteps:
    """Answers two texts; the second answer is measured."""
    tokens = session.model.tokenize(SAMPLE_TEXT)
    half = min(len(tokens) // 2, session.target.n_ctx // 4)
    session.reset()
    _answer(session, tokens[:half], _WARM_UP_STEPS)
    session.reset()
    before = session.placement_stats()
    times_s = sorted(_answer(session, tokens[half : 2 * half], _STEPS))
    after = session.placement_stats()
    session.reset()
    n_fast = max(1, len(times_s) - int(_SLOWEST * len(times_s)))
    hit_rate = (after - before).hit_rate_pairs if before is not None and after is not None else None
    return CachedSteps(sum(times_s[:n_fast]) / n_fast, hit_rate or 0.0)


def _answer(session: Session, prompt: Sequence[int], n_steps: int) -> list[float]:
    """Seconds of each step of an answer."""
    generation = session.generate(prompt, sampling=_GREEDY, ignore_eos=True)
    next(iter(generation), None)  # the prompt
    steps = within(_LIMIT_S, islice(generation, n_steps))
    times_s = [record.draft_s + record.verify_s + record.observe_s for record in steps]
    generation.close()
    if not times_s:
        raise EngineError("The measured answer has no step.")
    return times_s


def _streams_ts(session: Session) -> float:
    """Speed of prompts through which experts are streamed; 0 where they are computed in another way."""
    measured, stream = session.calibration, PrefillPath.STREAM
    return measured.prefill_ts[stream] if measured is not None and measured.prefill_path is stream else 0.0


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """A step's time with any number of whole layers, from the steps of three sessions; linear in the layers.

    plain_step_s: all experts on the CPU. whole_step_s: with n_whole whole layers and no cache. cached: with n_slots
    in a cache for all layers. A cached layer costs overhead_s more than one on the CPU, and gains in proportion to its
    hits. The hit rate is the slots' share of the experts to a power that the measured rate gives.
    """

    n_layers: int  # with experts
    n_experts: int  # per layer
    n_slots: int
    cached: CachedSteps
    plain_step_s: float
    n_whole: int
    whole_step_s: float
    overhead_s: float = 0.0

    def hit_rate(self, n_whole: int) -> float:
        """Of a cache for the other layers, with the slots that `n_whole` layers leave."""
        share = min(1.0, self.n_slots / (self.n_layers * self.n_experts))
        left = (self.n_slots - n_whole * self.n_experts) / ((self.n_layers - n_whole) * self.n_experts)
        measured = min(max(self.cached.hit_rate, 1e-6), 1.0)
        if left <= 0 or share >= 1:
            return max(0.0, min(left, 1.0))
        power = min(max(math.log(measured) / math.log(share), 0.01), 1.0)
        return float(min(left, 1.0) ** power)

    def step_s(self, n_whole: int) -> float:
        """Seconds with `n_whole` whole layers and a cache for the others."""
        whole_gain_s = (self.plain_step_s - self.whole_step_s) / max(1, self.n_whole)
        cached_gain_s = (self.plain_step_s - self.cached.step_s) / self.n_layers
        per_hit_s = (cached_gain_s + self.overhead_s) / max(self.cached.hit_rate, 1e-6)
        gain_s = per_hit_s * self.hit_rate(n_whole) - self.overhead_s
        return self.plain_step_s - n_whole * whole_gain_s - (self.n_layers - n_whole) * gain_s

    def best_between(self) -> int | None:
        """The fastest number of whole layers that leaves each other layer a slot; None where there is none."""
        numbers = range(1, min(self.n_whole, self.n_layers - 1) + 1)
        possible = (n for n in numbers if self.n_slots - n * self.n_experts >= self.n_layers - n)
        return min(possible, key=self.step_s, default=None)


@dataclass(frozen=True)
class _Search:
    _config: EngineConfig
    _device: ResolvedDevice
    _draft: Model | None
    _run: Run

    def run(self) -> LayerChoice | None:
        """The choice; None where the context is too small, or an earlier process ended here. Raises MoeedgeError."""
        start_s = time.perf_counter()
        cache_only = LayerSplit(0, ALL_ON_CPU, 1, 0.0)
        if self._leaves_out(cache_only):
            return None
        with self._open(cache_only) as session:
            if session.target.n_ctx < CONTEXT_MIN:
                return None
            info = session.model.info
            n_slots = session.info.cache_slots
            cached = time_steps(session)
            calibration, streams_ts = session.calibration, _streams_ts(session)
            can_widen = session.target.n_ctx >= _WIDE_UBATCH and self._config.n_ubatch == DEFAULT_N_UBATCH
            room_bytes = self._room_for_experts(session)
            session.set_mode("stock")
            plain_step_s = time_steps(session).step_s
        step_s = cached.step_s if n_slots else plain_step_s
        splits = [replace(cache_only, n_cpu_moe=info.n_layers, n_slots=n_slots, step_s=step_s)]
        may_stream = self._config.placement.prefill in (PrefillPath.AUTO, PrefillPath.STREAM)
        if n_slots and streams_ts and can_widen and may_stream and self._config.n_gpu_layers is None:
            wide = self._measure_wide(splits[0], streams_ts)
            splits = [wide] if wide is not None else splits
        tensors, _ = gguf_file.expert_tensors(self._config.model, n_layers=info.n_layers)
        uncached = self._measure_whole(tensors, info.n_layers, room_bytes)
        splits += [] if uncached is None else [uncached]
        if uncached is not None and n_slots:
            estimate = StepEstimate(
                n_layers=info.n_expert_layers,
                n_experts=info.n_experts,
                n_slots=n_slots,
                cached=cached,
                plain_step_s=plain_step_s,
                n_whole=uncached.n_whole,
                whole_step_s=uncached.step_s,
                overhead_s=calibration.units.block_overhead_s if calibration is not None and calibration.units else 0.0,
            )
            n_between = estimate.best_between() or 0
            n_cpu_moe = whole_layers(tensors, info.n_layers, n_between).n_cpu_moe
            between = self._measure(replace(splits[0], n_whole=n_between, n_cpu_moe=n_cpu_moe)) if n_between else None
            splits += [between] if between is not None else []
        return LayerChoice(
            device=self._device.ggml_name,
            n_layers=info.n_expert_layers,
            splits=tuple(splits),
            free_bytes=self._device.free_bytes,
            seconds=time.perf_counter() - start_s,
        )

    @contextmanager
    def _open(self, split: LayerSplit) -> Iterator[Session]:
        with (
            mark(split, self._config, self._device),
            Session.open(split.apply(self._config), draft_model=self._draft, run=self._run) as session,
        ):
            yield session

    def _leaves_out(self, split: LayerSplit) -> bool:
        """Whether an earlier process ended while it measured `split`, unless it shall be measured anew."""
        if self._config.placement.measure_anew or not is_marked(split, self._config, self._device):
            return False
        why = "An earlier start ended while it measured this; moeedge calibrate tries again."
        self._run.say(f"Not measured: {split}. {why}", Level.WARNING)
        return True

    def _measure(
        self, split: LayerSplit, accept: Callable[[Session], bool] = lambda _session: True
    ) -> LayerSplit | None:
        """`split` with the slots that it got and the time of a step; None where it does not fit or is not accepted."""
        if self._leaves_out(split):
            return None
        try:
            with self._open(split) as session:
                if not accept(session):
                    return None
                return replace(split, n_slots=session.info.cache_slots, step_s=time_steps(session).step_s)
        except MoeedgeError as error:
            self._run.say(f"Not measured: {split}. {error.message}")
            return None

    def _measure_whole(self, tensors: list[ExpertTensor], n_layers: int, room_bytes: int) -> LayerSplit | None:
        """The most whole layers, without a cache; None where there is no room for one."""
        on_gpu = tensors
        if self._config.n_gpu_layers is not None:  # llama.cpp counts the output as a layer
            first = n_layers + 1 - self._config.n_gpu_layers
            on_gpu = [tensor for tensor in tensors if tensor.layer >= first]
        most = most_whole_layers(on_gpu, n_layers, room_bytes).n_whole
        numbers = range(most, max(0, most - _ATTEMPTS), -1)
        splits = (LayerSplit(n, whole_layers(tensors, n_layers, n).n_cpu_moe, 0, 0.0) for n in numbers)
        return next(filter(None, map(self._measure, splits)), None)

    def _measure_wide(self, split: LayerSplit, streams_ts: float) -> LayerSplit | None:
        """`split` with graphs of more tokens for streamed prompts; None where not faster than `streams_ts`."""
        # llama.cpp's own offload is off: our backend takes these blocks
        wide = replace(split, n_ubatch=_WIDE_UBATCH, op_offload=False)
        return self._measure(wide, lambda session: _streams_ts(session) >= _FASTER * streams_ts)

    def _room_for_experts(self, session: Session) -> int:
        """Bytes that whole layers may take where no cache is."""
        reading, vram_bytes = devices.read_memory(self._device), self._config.placement.vram_bytes
        if reading is None:
            return 0
        room = reading.free_bytes + session.info.pool_bytes - reserve_bytes(self._device, reading.total_bytes)
        return max(0, room if vram_bytes is None else min(room, vram_bytes))
