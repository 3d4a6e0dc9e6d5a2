"""Python's share of a step: what the decoding thread computes outside of llama.cpp, by part, with a large vocabulary.

    python -m tests.benchmarks.python_share --out RECORD.json

A random-weight pair of three layers is written first, with a vocabulary of 151,936 tokens as Qwen3 has it: what Python
does in a step depends on the vocabulary, the draft length and the sampling options, hardly on the model.
Every case has a session of its own and answers the same prompt; the cases take turns. The first answer of each is not
counted. A draft of random weights is hardly ever accepted, so that the residual distribution is drawn from in nearly
every step that samples: the dear case.

Figures are medians over steps, of the decoding thread's processor time, which holds on a busy machine too, and of wall
time. A part inside another one is not counted twice; "rest" is everything between two steps that no other part has.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from moeedge.engine.answer import Answer
from moeedge.engine.drafts import ModelDraft
from moeedge.engine.sampling import Sampler
from moeedge.engine.session import Session
from moeedge.engine.speculative import SpeculativeLoop
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.hardware.provenance import read_provenance
from moeedge.native.compute import Decoder
from moeedge.scheduler.governor import GAMMA_MAX, DraftGovernor
from tests.support.tiny import make_tiny

SCHEMA = "moeedge-python-share-1"
VOCABULARY = 151_936  # tokens, as Qwen3
LLAMA = "llama.cpp"  # is no part of Python's share
REST = "rest"
PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    LLAMA: ((Decoder, "__call__"),),
    "draft": ((ModelDraft, "propose"),),  # batches and sampling
    "accept": ((Sampler, "accept"),),
    "observe": ((SpeculativeLoop, "_observe"),),
    "governor": ((DraftGovernor, "choose"), (DraftGovernor, "observe")),
    "text": ((Answer, "add_step"), (Answer, "read")),
}
SAMPLING = {
    "greedy": SamplingConfig(temperature=0.0, seed=0),
    "default": SamplingConfig(seed=0),
    "penalty": SamplingConfig(seed=0, repeat_penalty=1.1),
    "no-top-k": SamplingConfig(seed=0, top_k=0),
}
LENGTHS = ("0", "4", "auto")  # drafts
PROMPT = "The harbour was quiet in the early morning. Two boats had come in before sunrise."


class Meter:
    """Seconds that the calling thread spends in the parts of a step: wall and processor time."""

    def __init__(self) -> None:
        self._spent = {part: [0.0, 0.0] for part in (*PARTS, REST)}
        self._inner = (0.0, 0.0)  # of parts inside of the one that runs

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with its time added to `part`."""

        @wraps(call)
        def run(*arguments: Any, **named: Any) -> Any:
            (outer_wall_s, outer_cpu_s), self._inner = self._inner, (0.0, 0.0)
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
                spent = self._spent[part]
                spent[0] += wall_s - self._inner[0]
                spent[1] += cpu_s - self._inner[1]
                self._inner = (outer_wall_s + wall_s, outer_cpu_s + cpu_s)

        return run

    def read(self) -> list[list[float]]:
        """Seconds [parts and rest][wall, processor] since the last reading."""
        spent, self._spent = self._spent, {part: [0.0, 0.0] for part in self._spent}
        return list(spent.values())

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Times the parts of all sessions meanwhile."""
        with ExitStack() as stack:
            for part, places in PARTS.items():
                for owner, name in places:
                    stack.enter_context(patch.object(owner, name, self.timed(part, getattr(owner, name))))
            yield


@dataclass(frozen=True)
class Share:
    """The result of one case; medians over steps, in microseconds, without llama.cpp except in `llama_wall_us`."""

    sampling: str
    draft_max: str
    cpu_us: float  # of a step
    wall_us: float
    parts_cpu_us: dict[str, float]
    llama_wall_us: float
    tokens_per_batch: float  # mean over the steps: drafts and 1
    steps: int
    samples_cpu_us: list[float]  # one per step


def measure(model: Path, draft: Path, cases: list[tuple[str, str]], *, answers: int, n_predict: int) -> list[Share]:
    """Answers the prompt `answers` times per case (sampling, draft length), in turns."""
    meter = Meter()
    with ExitStack() as stack:
        sessions = {}
        for length in dict.fromkeys(length for _, length in cases):
            config = EngineConfig(
                model=model,
                draft=draft if length != "0" else None,
                gamma=GAMMA_MAX if length == "auto" else int(length),
                auto_gamma=length == "auto",
                device="none",
                n_ctx=1024,
                n_threads=1,
            )
            sessions[length] = stack.enter_context(Session.open(config))
        steps: dict[tuple[str, str], list[list[list[float]]]] = {case: [] for case in cases}
        batches: dict[tuple[str, str], list[int]] = {case: [] for case in cases}
        stack.enter_context(meter.installed())
        for number in range(answers + 1):
            for case in cases:
                found = _answer(sessions[case[1]], SAMPLING[case[0]], meter, n_predict)
                if number > 0:
                    steps[case] += [spent for spent, _ in found]
                    batches[case] += [n_tokens for _, n_tokens in found]
    return [_share(case, np.array(steps[case]) * 1e6, batches[case]) for case in cases]


def _answer(
    session: Session, sampling: SamplingConfig, meter: Meter, n_predict: int
) -> list[tuple[list[list[float]], int]]:
    """Seconds of each step's parts, and the tokens of its batch; without the prompt and the first step after it."""
    session.reset()
    generation = session.generate(
        session.model.tokenize(PROMPT), n_predict=n_predict, sampling=sampling, ignore_eos=True
    )
    steps = iter(generation)
    advance = meter.timed(REST, lambda: next(steps, None))
    read = meter.timed(REST, generation.read)
    found = []
    while (record := advance()) is not None:
        read(record.tokens)
        found.append((meter.read(), record.n_verified))
    return found[2:]


def _share(case: tuple[str, str], steps_us: np.ndarray[Any, Any], batches: list[int]) -> Share:
    """steps_us: [steps, parts and rest, 2]."""
    names = (*PARTS, REST)
    python_us = np.delete(steps_us, names.index(LLAMA), axis=1)
    cpu_us = python_us[..., 1].sum(axis=1)
    parts_us = np.median(python_us[..., 1], axis=0)
    own = [name for name in names if name != LLAMA]
    return Share(
        sampling=case[0],
        draft_max=case[1],
        cpu_us=round(float(np.median(cpu_us)), 1),
        wall_us=round(float(np.median(python_us[..., 0].sum(axis=1))), 1),
        parts_cpu_us={name: round(float(us), 1) for name, us in zip(own, parts_us, strict=True)},
        llama_wall_us=round(float(np.median(steps_us[:, names.index(LLAMA), 0])), 1),
        tokens_per_batch=round(float(np.mean(batches)), 2),
        steps=len(steps_us),
        samples_cpu_us=cpu_us.round(1).tolist(),
    )


def main() -> None:
    """Measures and prints a line per case; --out keeps the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=",".join(LENGTHS))
    parser.add_argument("--answers", type=int, default=3)
    parser.add_argument("-n", "--n-predict", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    cases = [(sampling, length) for length in options.lengths.split(",") for sampling in SAMPLING]
    with tempfile.TemporaryDirectory() as folder:
        pair = (make_tiny(arch, Path(folder), vocab=VOCABULARY) for arch in ("qwen3moe", "qwen3"))
        shares = measure(*pair, cases, answers=options.answers, n_predict=options.n_predict)
    for share in shares:
        parts = ", ".join(f"{part} {value:.0f}" for part, value in share.parts_cpu_us.items())
        print(
            f"{share.sampling:9s} drafts {share.draft_max:4s} us per step: {share.cpu_us:.0f} processor ({parts}), "
            f"{share.wall_us:.0f} wall; llama.cpp {share.llama_wall_us:.0f} wall; "
            f"{share.tokens_per_batch:.1f} tokens per batch"
        )
    if options.out:
        record = {
            "schema": SCHEMA,
            "environment": asdict(read_provenance()),
            "vocabulary": VOCABULARY,
            "results": [asdict(share) for share in shares],
        }
        options.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
