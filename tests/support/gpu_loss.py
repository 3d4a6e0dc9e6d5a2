"""An answer during which a GPU fails, in a process of its own: it must go on from the CPU with the same tokens.

    python -m tests.support.gpu_loss TARGET DEVICE [--draft FILE] [--ngl N] [--ratio R] [--temp T]

How the device fails is up to the caller (a backend named by $GGML_BACKEND_PATH, a library preloaded). Prints one JSON
object: `tokens` and `notes` of the answer, `again`: the tokens of a second answer to the same prompt, `lost`: whether
placement says that the device is lost.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.scheduler.config import PlacementConfig

PROMPT = [1, *range(5, 17)]
N_PREDICT = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("device")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--ngl", type=int, default=99)
    parser.add_argument("--ratio", type=float, default=0.0)
    parser.add_argument("--temp", type=float, default=0.0)
    options = parser.parse_args()
    config = EngineConfig(
        model=options.target,
        draft=options.draft,
        device=options.device,
        n_gpu_layers=options.ngl,
        n_ctx=256,
        n_threads=1,
        cpu_fallback=True,
        placement=PlacementConfig(cache_ratio=options.ratio, calibrate=False, policy="lru"),
    )
    sampling = SamplingConfig(temperature=options.temp, seed=7)
    with Session.open(config) as session:
        print("opened", flush=True)
        answer = session.generate(PROMPT, n_predict=N_PREDICT, sampling=sampling, ignore_eos=True)
        list(answer)
        again = session.generate(PROMPT, n_predict=N_PREDICT, sampling=sampling, ignore_eos=True)
        list(again)
        placement = session.placement_stats()
        result = {
            "tokens": answer.tokens,
            "again": again.tokens,
            "notes": session.info.notes,
            "lost": None if placement is None else placement.lost,
            "uses_gpu": session.model.uses_gpu,
        }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
