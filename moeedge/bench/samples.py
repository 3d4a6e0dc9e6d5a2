"""The raw samples of a run: one per mode, prompt, turn and repetition."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from moeedge.bench.placement import Counters
from moeedge.engine.types import GenerationStats, StopReason


@dataclass(frozen=True)
class Sample:
    """One timed answer (in a synthetic test: one timed run of decodes). All else is computed from these."""

    mode: str  # BenchMode.label
    prompt: str  # the prompt's id; "" in a synthetic test
    turn: int  # from 0
    repetition: int  # from 0
    order: int  # this mode ran as the order-th of the modes, from 0
    prompt_tokens: int = 0  # of the whole conversation
    prefill_tokens: int = 0  # of these, decoded now; the rest was in the KV cache from the turn before
    prefill_s: float = 0.0
    generated_tokens: int = 0
    decode_tokens: int = 0  # those that decode_s is for: without the first, which ends the prefill; with a stop token
    decode_s: float = 0.0
    ttft_s: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    experts_sum: float = 0.0  # over steps: distinct experts per layer and verification
    draft_s: float = 0.0
    verify_s: float = 0.0
    observe_s: float = 0.0
    cpu_s: float = (
        0.0  # processor seconds of this process, all threads: far below wall time x threads, others were busy
    )
    stop_reason: StopReason | None = None
    warm: bool = True  # this mode had run before, in the warm-up or in an earlier repetition
    prefill_placement: Counters | None = None  # the expert cache's counters up to the first token; None: no cache
    placement: Counters | None = None  # the same from the first token on
    answer: str | None = None  # the text; with scores only
    score: float | None = None  # 0 to 1; None: not scored
    score_reason: str = ""  # why it is not 1, in one line
    # kept for the output check, no part of the record
    tokens: list[int] = field(default_factory=list)  # the answer, without the stop token
    prompt_ids: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int, int]:
        """What the same work in another mode has in common with it."""
        return (self.prompt, self.turn, self.repetition)

    @property
    def pp_ts(self) -> float | None:
        """Prefill speed in tokens/s."""
        return self.prefill_tokens / self.prefill_s if self.prefill_tokens and self.prefill_s > 0 else None

    @property
    def tg_ts(self) -> float | None:
        """Decode speed in tokens/s."""
        return self.decode_tokens / self.decode_s if self.decode_tokens and self.decode_s > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """For the record: all but the tokens and the mode, which the row names."""
        fields = asdict(self)
        del fields["tokens"], fields["prompt_ids"], fields["mode"]
        return fields


def from_stats(stats: GenerationStats, *, stop_reason: StopReason | None, **others: Any) -> Sample:
    """A sample from what the engine counted; `others` are the fields that it does not know."""
    return Sample(
        stop_reason=stop_reason,
        prompt_tokens=stats.prompt_tokens,
        prefill_tokens=stats.prefill_tokens,
        prefill_s=stats.prefill_s,
        generated_tokens=stats.generated_tokens,
        # the engine leaves a stop token out of the answer; it was decoded all the same
        decode_tokens=max(stats.generated_tokens - 1 + (stop_reason == "eos"), 0),
        decode_s=stats.decode_s,
        ttft_s=stats.ttft_s,
        steps=stats.steps,
        drafted=stats.drafted,
        accepted=stats.accepted,
        experts_sum=stats.experts_sum,
        draft_s=stats.draft_s,
        verify_s=stats.verify_s,
        observe_s=stats.observe_s,
        **others,
    )
