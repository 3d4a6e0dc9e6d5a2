"""SP-MoE in the engine: its parts one by one, and how well a draft's hidden states predict the target's experts.

Ablation, as in Figures 12 and 14: prefetch, worker, batched transfers, cutoff layer. All variants run the same target
with the same draft, load a missing expert when its layer needs it, and keep the same LRU cache. They differ in the
experts that are prefetched while the draft works, and in how. They take turns at every prompt, and every answer is
compared with stock llama.cpp's.

Similarity of a pair, layer by layer, by section 2.2 (Observation I, Figure 2(c)) and section 3.2 (Figure 7): both
models read the same text, and the draft's layers go with the target's at the same relative depth, as in
`DraftRouterPredictor`.

  cosine similarity   of the inputs of a target layer's router and of its draft layer's FFN, the latter rescaled to the
                      norm before the router where both norms are known (Figure 7(a))
  top-n accuracy      share of the n experts that the target's router ranks first for the draft's input that the token
                      really uses (Figure 7(b) has n = 1)
  entropy             of the router's probabilities in bits, for the draft's input ("gating-based") and for the target's
                      own ("actual"); log2(N) is "random", and the popularity's entropy "coarse-grained" (Figure 2(c))
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from moeedge import paths
from moeedge.analysis.routing_curves import entropy_bits
from moeedge.bench.arms import load_models, open_arm
from moeedge.bench.config import MODES, REFERENCE, BenchMode
from moeedge.bench.experiment import BenchArm, Conversations
from moeedge.bench.quality import check_answers, logits_in
from moeedge.bench.samples import Sample
from moeedge.data.prompts import Prompt
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import EngineError, InputError
from moeedge.llama import gguf_file, library
from moeedge.llama.routers import Routers, read_norms
from moeedge.native import CaptureFlags
from moeedge.native.abi import Phase
from moeedge.paths import replace_file
from moeedge.records import combine
from moeedge.run import Run
from moeedge.scheduler.config import ExecutionConfig
from moeedge.scheduler.native_io import routing
from moeedge.scheduler.prediction import matching_layers

POLICY = "sp-moe-prefetch"  # SP-MoE with misses="load"
# name -> enum llama_ftype of llama.h; rows that a type's blocks do not divide get llama.cpp's fallback type
DRAFT_TYPES = {"q2_k": 10, "q3_k": 12, "q4_0": 2, "q4_k": 15, "iq4_nl": 25, "q5_0": 8, "q8_0": 7}
_ENTIRE_LAYER = 1 << 16  # experts per transfer: more than any layer has


def figure_12(cutoff: int) -> list[BenchMode]:
    """Returns baseline, vanilla prefetch, worker, worker with batched transfers; each adds one part."""
    baseline = ExecutionConfig(misses="load", cutoff_layer=cutoff, batch=1, drafting="off")  # no prefetch
    worker = replace(baseline, drafting="worker")  # drafting does not wait
    variants = {
        "baseline": baseline,
        "vanilla": replace(baseline, drafting="vanilla"),  # each draft layer waits for its experts
        "worker": worker,
        "batched": replace(worker, batch=_ENTIRE_LAYER),  # the experts of a layer in one transfer
    }
    return [BenchMode(name, "moeedge", drafts=True, execution=execution) for name, execution in variants.items()]


def figure_14(cutoffs: Sequence[int]) -> list[BenchMode]:
    """Returns the complete system at each cutoff layer."""
    return [figure_12(cutoff)[-1] for cutoff in dict.fromkeys(cutoffs)]


@dataclass(frozen=True)
class AblationRow:
    """Figures of a variant: sums over all prompts and repetitions; the time per token is the median over answers."""

    variant: str
    cutoff_layer: int
    tpot_s: float
    tg_ts: float
    speedup: float  # over the first row
    acceptance_rate: float | None
    # the target's layers in verifications; an expert counts once per layer and step
    hit_rate_experts: float | None  # share of the experts that were resident when their layer needed them
    loaded_per_step: float  # absent experts: their layer loaded them and waited
    late_per_step: float  # experts in flight: their layer waited
    # the link
    ahead_per_step: float  # experts that arrived before their layer needed them
    uploads_per_step: float
    bytes_per_step: float
    transfers_per_step: float
    # drafting
    plans_per_step: float  # predictions that were planned for
    draft_stops_per_step: float  # layers of the draft that waited
    predicted_right: float | None  # share of the predicted experts that were used
    draft_s: float  # per step, all of drafting
    verify_s: float  # per step
    equal: int  # answers equal to stock's, near-ties included
    answers: int


def solved_cutoff(config: EngineConfig, run: Run) -> tuple[int, str]:
    """Returns SP-MoE's cutoff layer from the calibrated cost model, and a sentence that explains it.

    Section 3.2: the experts of all layers before it fit the slots and arrive while the draft works.
    """
    with Session.open(replace(config, placement=replace(config.placement, policy=POLICY)), run=run) as session:
        info, units = session.info, None if session.calibration is None else session.calibration.units
        if session.placement is None:
            raise InputError("No device holds experts: there is no system to take apart.", "Use -dev emulated.")
        draft_s, transfer_s = (0.0, 0.0) if units is None else (units.draft_token_s, units.transfer_expert_s)
        n = session.placement.driver.policy.cutoff(info.n_expert_used)
        return n, (
            f"Cutoff layer {n} of {info.n_expert_layers}: a draft token takes {draft_s * 1e3:.2f} ms, an expert "
            f"{transfer_s * 1e6:.1f} us; {info.cache_slots:,} slots."
        )


def run_ablation(
    config: EngineConfig,
    variants: Sequence[BenchMode],
    prompts: Sequence[Prompt],
    *,
    n_predict: int,
    repetitions: int,
    run: Run,
) -> list[AblationRow]:
    """Measures the variants side by side on the first turns of `prompts`, and compares every answer with stock's.

    config: with policy sp-moe-prefetch. run: told the sessions' notes and of each answer.
    """
    first_turns = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
    with ExitStack() as stack:
        models = load_models(config, variants, stack)
        stock, *arms = (
            open_arm(config, mode, stack, model=models[0], draft_model=models[1])
            for mode in (MODES[REFERENCE], *variants)
        )
        placement = arms[-1].session.placement
        if placement is None or placement.draft_prefetch is None:
            reasons = [note for note in arms[-1].session.info.notes if "predicts no experts here" in note]
            raise InputError(
                reasons[0] if reasons else "No device holds experts.",
                "Give a draft of the target's hidden size, or leave out -md; without a device, use -dev emulated.",
            )
        for note in dict.fromkeys(note for arm in arms for note in arm.session.info.notes):
            run.say(note)
        work = partial(Conversations, name="", warms_up=False, n_predict=n_predict, ignore_eos=True)
        expected = list(work(prompts=first_turns).samples([stock], [0]))
        logits_at, end_tokens = logits_in(stock.session.target), models[0].eog_tokens
        list(work(prompts=first_turns[:1]).samples(arms, [0]))  # warms up
        before = {arm.mode.label: _counts(arm.session) for arm in arms}
        samples: dict[str, list[Sample]] = {arm.mode.label: [] for arm in arms}
        equal: Counter[str] = Counter()
        for sample in work(prompts=first_turns).samples(arms, range(repetitions)):
            check = check_answers([sample], expected, logits_at, end_tokens)
            samples[sample.mode].append(sample)
            equal[sample.mode] += check.passed
            seconds = sample.ttft_s + sample.decode_s
            run.say(f"{sample.mode}, prompt {sample.prompt}: {seconds:.1f} s")
        labels = [arm.mode.label for arm in arms]
        rows = [_row(arm, samples[label], before[label], equal[label]) for arm, label in zip(arms, labels, strict=True)]
        return [replace(row, speedup=rows[0].tpot_s / row.tpot_s) for row in rows]


def _row(arm: BenchArm, samples: Sequence[Sample], before: dict[str, float], equal: int) -> AblationRow:
    """The figures of a variant. before: its counters then."""
    placement, execution = arm.session.placement, arm.mode.execution
    assert placement is not None and execution is not None
    steps = max(sum(sample.steps for sample in samples), 1)
    per_step = {name: (value - before[name]) / steps for name, value in _counts(arm.session).items()}
    waited_for = per_step["loaded"] + per_step["late"]
    tpot_s = median(1.0 / sample.tg_ts for sample in samples if sample.tg_ts)
    return AblationRow(
        variant=arm.mode.name,
        cutoff_layer=execution.cutoff_layer or 0,
        tpot_s=tpot_s,
        tg_ts=1.0 / tpot_s,
        speedup=1.0,
        acceptance_rate=combine(samples).acceptance_rate,
        hit_rate_experts=1.0 - waited_for / per_step["needed"] if per_step["needed"] else None,
        ahead_per_step=max(per_step["uploads"] - per_step["loaded"], 0.0),
        bytes_per_step=per_step["bytes_moved"],
        draft_stops_per_step=per_step["stops"],
        **{f"{name}_per_step": per_step[name] for name in ("loaded", "late", "uploads", "transfers", "plans")},
        predicted_right=placement.predicted_share,
        draft_s=sum(sample.draft_s for sample in samples) / steps,
        verify_s=sum(sample.verify_s for sample in samples) / steps,
        equal=equal,
        answers=len(samples),
    )


def _counts(session: Session) -> dict[str, float]:
    """Counts since the session began: transfers, and experts between the layers of target and draft."""
    placement, stats = session.placement, session.placement_stats()
    assert placement is not None and placement.on_demand is not None and stats is not None
    counters = (
        (stats, ("uploads", "bytes_moved", "transfers")),
        (placement.on_demand, ("needed", "loaded", "late")),
        (placement.draft_prefetch, ("plans", "stops")),
    )
    return {name: float(getattr(of, name, 0)) for of, names in counters for name in names}


def quantized(model: Path, type_name: str = "q4_0") -> Path:
    """Returns the path of `model` quantized to `type_name` as its own draft, kept in the cache folder from first use.

    A low-bit copy has the same hidden size and nearly the same hidden states, which SP-MoE's predictor relies on.

    Raises ModelFileError for an unusable model, InputError for an unknown type or a cache that cannot be written,
    EngineError when llama.cpp fails.
    """
    gguf_file.read_summary(model)
    if type_name not in DRAFT_TYPES:
        raise InputError(f"Unknown type '{type_name}' for a draft.", f"Choose from: {', '.join(DRAFT_TYPES)}.")
    status = model.stat()
    identity = f"{model.resolve()}|{status.st_size}|{status.st_mtime_ns}|{type_name}"
    name = f"{model.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}-{type_name}.gguf"
    try:
        file = paths.cache_dir() / "drafts" / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(file) as temporary:
                _quantize(model, temporary, DRAFT_TYPES[type_name])
    except OSError as error:
        raise InputError(
            f"Cannot write the draft to the folder of what moeedge keeps: {error.strerror}.",
            "Set MOEEDGE_CACHE to a folder that you may write, or give a draft with -md FILE.",
        ) from None
    return file


def _quantize(model: Path, out: Path, file_type: int) -> None:
    library.start()
    library.clear_errors()
    parameters = lib.llama_model_quantize_default_params()
    parameters.ftype = file_type
    parameters.nthread = library.physical_cores()
    parameters.allow_requantize = True  # requantizing a quantized model loses little more
    if lib.llama_model_quantize(os.fsencode(model), os.fsencode(out), ctypes.byref(parameters)) != 0:
        raise EngineError(f"llama.cpp cannot quantize {model}: {library.first_error()}.")


FloatArray = NDArray[np.float32]
MAX_TOKENS = 1024  # of all texts together: each costs a decode of both models in small batches
_NOT_COMPARED = "Draft and target cannot be compared"
_BATCH = 16  # tokens; activations of larger batches than 32 are not captured


@dataclass(frozen=True)
class PairSimilarity:
    """Means over the tokens of each layer; lists are by `layers`, those with experts in host memory."""

    draft: str  # file name
    tokens: int
    layers: list[int]
    cosine: list[float]
    top_n: list[list[float]]  # [k] of each layer: n = 1..k
    entropy_draft_bits: list[float]
    entropy_target_bits: list[float]


def compare_pair(session: Session, texts: Sequence[Sequence[int]], run: Run) -> PairSimilarity | None:
    """Both models read `texts` (token ids), MAX_TOKENS at most.

    The contexts' KV caches are empty afterwards. run: asked between batches whether to stop; the result covers the
    tokens until then, None without any. Its progress is in tokens. Raises EngineError for a pair that has no
    comparison, ModelFileError for routers that it cannot read.
    """
    sums = _Sums(session)
    for text in texts:
        session.reset()
        read = text[: sums.n_ctx]  # an answer may have gone on after a context shift
        for start in range(0, len(read), _BATCH):
            batch = list(read[start : start + min(_BATCH, MAX_TOKENS - sums.tokens)])
            if run.cancelled() or not batch:
                break
            sums.read(batch)
            run.progress.add(len(batch))
    session.reset()
    result = sums.result()
    if result is None and not run.cancelled():
        raise EngineError(f"{_NOT_COMPARED}: no layer of the two was captured.")
    return result


class _Sums:
    """Sums over the tokens read so far, per layer of the target."""

    def __init__(self, session: Session) -> None:
        target, draft = session.target, session.draft_context
        if draft is None:
            raise EngineError(f"{_NOT_COMPARED}: there is no draft model.")
        info, drafting = target.model.info, draft.model.info
        if info.n_embd != drafting.n_embd:
            raise EngineError(
                f"{_NOT_COMPARED}: the draft's hidden states have {drafting.n_embd} values and the target's "
                f"{info.n_embd}."
            )
        own, drafted = target.capture_activations(), draft.capture_activations()
        if own is None or drafted is None:
            raise EngineError(f"{_NOT_COMPARED}: llama.cpp computes the draft on a GPU.")
        self._target, self._draft, self._own, self._drafted = target, draft, own, drafted
        self.n_ctx = min(target.n_ctx, draft.n_ctx)
        self._routers = Routers.read(target.model)
        self._k = info.n_expert_used
        self._draft_layer_of = matching_layers(info.n_layers, drafting.n_layers)
        norms = read_norms(draft.model)
        layers = np.arange(info.n_layers)
        self._ratio = self._routers.ratio(layers, None if norms is None else norms[self._draft_layer_of])
        own.enable(CaptureFlags.INPUTS)
        drafted.enable(CaptureFlags.INPUTS)
        self.tokens = 0
        self._seen = np.zeros(info.n_layers, dtype=np.int64)  # tokens
        self._cosine = np.zeros(info.n_layers)
        self._hits = np.zeros((info.n_layers, self._k), dtype=np.int64)  # of the n-th prediction
        self._entropy = np.zeros((2, info.n_layers))  # of draft and target

    def read(self, batch: list[int]) -> None:
        """Decodes the batch with both models and adds its tokens."""
        self._draft.decode(batch, phase=Phase.DRAFT, logits="all")
        self._target.decode(batch, phase=Phase.VERIFY, logits="all")  # the last layer computes tokens with logits only
        n = len(batch)
        self.tokens += n
        draft, target = self._drafted.read(CaptureFlags.INPUTS), self._own.read(CaptureFlags.INPUTS)
        sensor = self._target.sensor
        frames = [] if sensor is None else sensor.frames()
        if not frames or frames[-1].n_tokens != n:
            return
        used, _ = routing(frames[-1])  # [n_layers, n, k]
        captured = (target.layer_tokens == n) & (draft.layer_tokens[self._draft_layer_of] == n)
        for layer in np.flatnonzero(captured & (used[:, :, 0] >= 0).all(axis=1)):
            inputs = draft.rows[self._draft_layer_of[layer], :n]
            if self._ratio is not None:
                inputs = inputs * self._ratio[layer]
            self._add(int(layer), inputs, target.rows[layer, :n], used[layer])

    def _add(self, layer: int, drafted: FloatArray, own: FloatArray, used: NDArray[np.int32]) -> None:
        """One layer: inputs [n, n_embd] of both models and the experts [n, k] that the tokens use."""
        here = slice(layer, layer + 1)
        dots = np.einsum("te,te->t", drafted, own, dtype=np.float64)
        lengths = np.linalg.norm(drafted.astype(np.float64), axis=1) * np.linalg.norm(own.astype(np.float64), axis=1)
        self._cosine[layer] += float((dots / np.maximum(lengths, np.finfo(np.float64).tiny)).sum())
        scores = self._routers.scores(here, drafted[None])
        predicted = self._routers.best(here, scores, self._k)[0]  # [n, k]
        self._hits[layer] += (predicted[:, :, None] == used[:, None, :]).any(axis=2).sum(axis=0)
        for row, probabilities in enumerate((scores[0], self._routers.scores(here, own[None])[0])):
            self._entropy[row, layer] += float(entropy_bits(probabilities).sum())
        self._seen[layer] += len(used)

    def result(self) -> PairSimilarity | None:
        """The means; None where no layer was captured."""
        layers = np.flatnonzero(self._seen)
        if not layers.size:
            return None
        seen = self._seen[layers]
        top_n = self._hits[layers].cumsum(axis=1) / (seen[:, None] * np.arange(1, self._k + 1))
        return PairSimilarity(
            draft=self._draft.model.path.name,
            tokens=int(seen.max()),
            layers=layers.tolist(),
            cosine=(self._cosine[layers] / seen).tolist(),
            top_n=top_n.tolist(),
            entropy_draft_bits=(self._entropy[0, layers] / seen).tolist(),
            entropy_target_bits=(self._entropy[1, layers] / seen).tolist(),
        )
