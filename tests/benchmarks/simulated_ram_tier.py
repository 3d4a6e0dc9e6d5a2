"""The simulated RAM tier against the engine: tokens/s and loads per token with slots for a share of the experts.

    moeedge lab widen MODEL.gguf --embd 512 --ff 256 --type q4_0
    python -m tests.benchmarks.simulated_ram_tier -m MODEL.gguf --rates 100MB/s,200MB/s,400MB/s --out RECORD.json

The engine answers two prompts on a disk that is made as slow as asked for; the first answer warms up, the second
counts. The simulator replays the trace that this run recorded. Its constants come from another run, with slots for
all experts: the times of blocks and of the rest of a step, of drafting and observing. Prompts count on neither side.
Every combination is measured --rounds times, in turns; medians count. Exit status 1: a row differs by
more than --limit. --rates 0: the disk as it is, whose rate is then that of the measured loads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np

from moeedge import paths
from moeedge.bench.records import read_environment
from moeedge.engine.conversation import Conversation, prompt_tokens
from moeedge.engine.recording import TraceCollector, describe
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.lab.experiments.validation import PROMPTS
from moeedge.lab.sim.clock import to_ns
from moeedge.lab.sim.execution import Execution
from moeedge.lab.sim.noisy_predictor import NoisyPredictor, PredictorAccuracy
from moeedge.lab.sim.ram_tier import RamSlots, RamTierConfig
from moeedge.lab.sim.step_costs import TOKENS_MAX, StepCosts
from moeedge.lab.traces.schedule import as_computed
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.policies.base import CacheShape, PolicyConfig, ScoringPolicy
from moeedge.policies.cost_model import CostFit, fit_side
from moeedge.policies.registry import make_policy
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.stats import StepRecord
from moeedge.trace.format import Trace
from moeedge.units import parse_rate

SCHEMA = "moeedge-simulated-ram-tier-1"
GREEDY = SamplingConfig(temperature=0.0, seed=0)
POLICY = "lfu"


@dataclass(frozen=True)
class Answer:
    """The answer that counts: its steps without the prompt."""

    tokens: int  # of text, the first one excluded: the prompt gives it
    steps: int
    drafted: int
    decode_s: float
    draft_s: float
    verify_s: float
    observe_s: float
    blocks_wait_s: float  # of the last blocks that the cache keeps records of
    blocks_cpu_s: float
    loads: int
    disk_bytes_per_s: float  # while loads were under way


@dataclass(frozen=True, eq=False)
class Run:
    """One session."""

    answer: Answer
    trace: Trace
    shape: CacheShape
    warm_steps: int
    blocks: np.ndarray  # records of the last answer's blocks
    expert_bytes: float


@dataclass(frozen=True)
class Row:
    """Measured and simulated; speeds are tokens of text per second."""

    ram_ratio: float
    disk_bytes_per_s: float
    gamma: int
    measured_ts: list[float]  # of each round
    tg_ts: float  # simulated
    error: float  # of the seconds per token, against the median
    measured_loads_per_token: float
    loads_per_token: float
    measured_bytes_per_token: float
    bytes_per_token: float
    measured_disk_share: float  # of the time that is spent waiting for the disk
    disk_share: float
    measured_cpu_share: float  # computing experts
    cpu_share: float


def run(options: argparse.Namespace, ratio: float, rate: float, gamma: int, prompts: Sequence[str]) -> Run:
    """Answers the prompts one after the other; the last answer counts."""
    all_bytes = expert_bytes(expert_tensors(options.model)[0])
    config = EngineConfig(
        model=options.model,
        draft=options.draft if gamma else None,
        gamma=gamma,
        n_ctx=1024,
        n_threads=options.threads,
        device="none",
        ram=max(1, int(ratio * all_bytes) + 1),
        placement=PlacementConfig(policy=POLICY, calibrate=False, disk_bytes_per_s=rate),
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOEEDGE_CACHE"] = folder  # no run warms another
        with Session.open(config) as session:
            assert session.placement is not None
            collector = TraceCollector(describe(session.info, "simulated_ram_tier"))
            session.observers.append(collector)
            records: list[StepRecord] = []
            warm_steps = 0
            cache = session.placement.cache
            for text in prompts:
                warm_steps += len(records)
                records = []
                conversation = Conversation(system="")
                conversation.ask(text)
                session.reset()
                ids = prompt_tokens(session.model, conversation, raw=False)
                if session.target.sensor is not None:
                    session.target.sensor.frames()
                collector.begin(ids)
                generation = session.generate(ids, n_predict=options.n_predict, sampling=GREEDY, ignore_eos=True)
                next(iter(generation), None)  # the prompt
                before, _ = cache.stats(), cache.blocks()
                records.extend(generation)
            after = cache.stats()
            group, capacity, _ = cache.groups()
            info = session.model.info
            draft_s, verify_s, observe_s = (
                sum(getattr(record, name) for record in records) for name in ("draft_s", "verify_s", "observe_s")
            )
            blocks = cache.blocks()
            moved_s = after.transfer_s - before.transfer_s
            answer = Answer(
                tokens=sum(record.n_accepted + 1 for record in records),
                steps=len(records),
                drafted=sum(record.n_drafted for record in records),
                decode_s=draft_s + verify_s + observe_s,
                draft_s=draft_s,
                verify_s=verify_s,
                observe_s=observe_s,
                blocks_wait_s=float(blocks["wait_ns"].sum()) * 1e-9,
                blocks_cpu_s=float(blocks["cpu_ns"].sum()) * 1e-9,
                loads=after.uploads - before.uploads,
                disk_bytes_per_s=rate or (after.bytes_moved - before.bytes_moved) / max(moved_s, 1e-9),
            )
            return Run(
                answer=answer,
                trace=collector.trace(),
                shape=CacheShape(info.n_layers, info.n_experts, group.copy(), capacity.copy()),
                warm_steps=warm_steps,
                blocks=blocks,
                expert_bytes=all_bytes / (info.n_expert_layers * info.n_experts),
            )


def fit_costs(reference: Run) -> StepCosts:
    """The constants, from a run that loads next to nothing; its waits do not count."""
    blocks = reference.blocks[reference.blocks["wait_ns"] == 0]
    unique, pairs = blocks["unique_device"], blocks["pairs_device"]
    fit = fit_side(blocks["n_tokens"], unique, pairs, blocks["cpu_ns"] * 1e-9)
    assert fit is not None, "too few blocks"
    answer, n_layers = reference.answer, reference.shape.n_layers
    rest_s = (answer.verify_s - answer.blocks_wait_s - answer.blocks_cpu_s) / answer.steps / n_layers
    return StepCosts(
        cpu_ns=_curve(fit),
        device_ns=np.zeros(TOKENS_MAX + 1, np.int64),
        block_ns=to_ns(fit.fixed_s),
        sync_ns=0,
        transfer_ns=0,
        demand_ns=0,
        latency_ns=0,
        dense_ns=to_ns(max(rest_s, 0.0) + fit.fixed_s),
        head_ns=0,
        draft_ns=to_ns(answer.draft_s / max(answer.drafted, 1)),
        schedule_ns=to_ns(answer.observe_s / answer.steps),
    )


def _curve(fit: CostFit) -> np.ndarray:
    tokens = np.arange(TOKENS_MAX + 1)
    seconds = fit.expert_s + fit.token_s * (tokens - 1)
    seconds[0] = 0.0
    return np.rint(seconds * 1e9).astype(np.int64)


def simulate(measured: Run, costs: StepCosts, ratio: float) -> Execution:
    """The run's own trace through the simulated tier; run already."""
    shape = measured.shape
    no_device = CacheShape(shape.n_layers, shape.n_experts, shape.group, np.zeros_like(shape.capacity))
    tier = RamTierConfig(
        ratio=ratio,
        disk_bytes_per_s=measured.answer.disk_bytes_per_s,
        expert_bytes=measured.expert_bytes,
        policy=POLICY,
    )
    scores = make_policy(POLICY, shape, PolicyConfig())
    assert isinstance(scores, ScoringPolicy)
    execution = Execution(
        costs,
        no_device,
        make_policy(POLICY, no_device, PolicyConfig()),
        as_computed(measured.trace).batches(),
        predictor=NoisyPredictor(np.ones((shape.n_layers, shape.n_experts)), PredictorAccuracy(), 0),
        warm_steps=measured.warm_steps,
        ram=lambda clock, log: RamSlots(clock, log, costs, shape, scores, tier),
    )
    execution.run()
    return execution


def compare(runs: list[Run], costs: StepCosts, ratio: float, gamma: int) -> Row:
    """One combination."""
    times_s = [each.answer.decode_s / each.answer.tokens for each in runs]
    middle = sorted(runs, key=lambda each: each.answer.decode_s)[len(runs) // 2]
    answer = middle.answer
    execution = simulate(middle, costs, ratio)
    assert execution.ram is not None
    time, hits = execution.time, execution.ram.hits
    loads = (hits.unique - hits.unique_hit) / time.tokens
    return Row(
        ram_ratio=ratio,
        disk_bytes_per_s=answer.disk_bytes_per_s,
        gamma=gamma,
        measured_ts=[1 / seconds for seconds in times_s],
        tg_ts=1 / time.tpot_s,
        error=time.tpot_s / statistics.median(times_s) - 1,
        measured_loads_per_token=answer.loads / answer.tokens,
        loads_per_token=loads,
        measured_bytes_per_token=answer.loads / answer.tokens * middle.expert_bytes,
        bytes_per_token=loads * middle.expert_bytes,
        measured_disk_share=answer.blocks_wait_s / answer.decode_s,
        disk_share=time.ns["disk"] / time.total_ns,
        measured_cpu_share=answer.blocks_cpu_s / answer.decode_s,
        cpu_share=time.ns["cpu"] / time.total_ns,
    )


def line_of(row: Row) -> str:
    """A line of the table."""
    where = f"{row.ram_ratio:.0%} of the experts, {row.disk_bytes_per_s / 1e6:.0f} MB/s, drafts {row.gamma}"
    speed = f"{statistics.median(row.measured_ts):.2f} t/s, simulated {row.tg_ts:.2f} ({row.error:+.1%})"
    loads = f"loads/token {row.measured_loads_per_token:.1f}, {row.loads_per_token:.1f}"
    shares = f"disk {row.measured_disk_share:.0%}, {row.disk_share:.0%}"
    return f"{where}: measured {speed}; {loads}; {shares}; experts {row.measured_cpu_share:.0%}, {row.cpu_share:.0%}"


def main() -> None:
    """Measures, simulates, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, default=paths.bundled_draft())
    parser.add_argument("--rates", default="100MB/s,200MB/s,400MB/s")
    parser.add_argument("--ratios", default="0.5,0.65,0.75")
    parser.add_argument("--gammas", default="0,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-n", "--n-predict", type=int, default=48)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=0.15)
    parser.add_argument("--reference-ratio", type=float, default=1.0, help="of the run that gives the constants")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ratios = [float(ratio) for ratio in options.ratios.split(",")]
    rates = [0.0 if rate == "0" else parse_rate(rate) for rate in options.rates.split(",")]
    gammas = [int(gamma) for gamma in options.gammas.split(",")]
    wanted = list(product(ratios, rates, gammas))
    runs: dict[tuple[float, float, int], list[Run]] = {point: [] for point in wanted}
    references: dict[int, list[Run]] = {gamma: [] for gamma in gammas}
    for number in range(options.rounds):
        for gamma in gammas:  # the last text twice: then nothing is loaded
            references[gamma].append(run(options, options.reference_ratio, 0.0, gamma, (*PROMPTS, PROMPTS[-1])))
        for point in wanted:
            print(f"{number + 1} of {options.rounds}: {point}", file=sys.stderr, flush=True)
            runs[point].append(run(options, *point, PROMPTS))
    rows = []
    for point, found in runs.items():
        ratio, _, gamma = point
        middle = sorted(references[gamma], key=lambda each: each.answer.decode_s)[options.rounds // 2]
        row = compare(found, fit_costs(middle), ratio, gamma)
        rows.append(row)
        print(line_of(row))
    if options.out:
        record = {
            "schema": SCHEMA,
            "environment": asdict(read_environment()),
            "model": options.model.name,
            "threads": options.threads,
            "rows": [asdict(row) for row in rows],
            "references": {gamma: [asdict(each.answer) for each in found] for gamma, found in references.items()},
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.exit(int(any(abs(row.error) > options.limit for row in rows)))


if __name__ == "__main__":
    main()
