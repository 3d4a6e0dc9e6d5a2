"""Regret of the governors of 0.21.0, of one core (decision_core.py) and of decayed means, on the same streams.

    python -m tests.benchmarks.decision_regret 4

Of the surfaces: T(t) of fixed lengths as measured; T(1) is that of stock over 1.26, its ratio under the same routing.
Layers: three divisions, sessions that differ by 3 %, steps by `noise`.
"""

import gzip, json, math, sys
from dataclasses import replace
import numpy as np
from moeedge import speculation
from moeedge.scheduler.governor import DraftGovernor, StepCost, GAMMA_MAX
from moeedge.scheduler.cache_governor import CacheGovernor
from tests.scheduler import test_governor as tg
from tests.scheduler import test_cache_governor as tc

from tests.benchmarks.decision_core import Online, Sketch

RATIO = np.array([(speculation.uniform_unique(128, 8, t) / 8) ** 0.7 for t in range(1, GAMMA_MAX + 2)])


class Today:
    def __init__(self):
        self.g = DraftGovernor(n_experts=128, n_used=8)

    def choose(self):
        return 0, self.g.choose().gamma

    def observe(self, n, a, d, t):
        self.g.observe(StepCost(n_drafted=n, n_accepted=a, draft_s=d, target_s=t))


def surfaces():
    """T_T(t) and T_D of the instrument's surfaces: fixed lengths as measured, between them log-linear."""
    for kind in ("draft", "head"):
        rows = json.load(gzip.open(f"docs/benchmarks/surface-gptoss-20b-{kind}.json.gz"))
        for rate in (0.5, 0.7, 0.8, 0.9):
            own = [r for r in rows if r["acceptance"] == rate]
            t_s, noise, d = {}, [], []
            for r in own:
                if not r["mode"].startswith("moeedge") or r["auto_gamma"]:
                    continue
                each = [s["verify_s"] / s["steps"] for s in r["samples"]]
                t_s[r["gamma"] + 1] = float(np.median(each))
                noise.append(np.std(np.log(each)))
                d += [s["draft_s"] / s["drafted"] for s in r["samples"] if s["drafted"]]
            plain = next(r for r in own if r["mode"] == "stock-ar")
            t_s[1] = float(np.median([s["verify_s"] / s["steps"] for s in plain["samples"]])) / 1.26
            ts = sorted(t_s)
            f = lambda t, ts=ts, t_s=t_s: (
                float(np.exp(np.interp(np.log(t), np.log(ts), np.log([t_s[x] for x in ts]))))
                * (1 if t <= ts[-1] else (t / ts[-1]) ** 0.5)
            )
            yield f"{kind} {rate}", tg.Trace(f, float(np.median(d)), lambda n, r=rate: r, noise=0.15)


def draft_regret(trace, make, seed):
    rng, gov = np.random.default_rng(seed), make()
    best_gamma, _ = tg.best_fixed(trace)
    n, s, b = 0, 0.0, 0.0
    while n < tg.N_TOKENS:
        gamma = gov.choose()[1]
        step = trace.step(gamma, n, rng)
        gov.observe(gamma, step.n_accepted, step.draft_s, step.target_s)
        s += trace.expected_s(gamma, n)
        b += speculation.expected_tokens(gamma, trace.acceptance(n)) * trace.seconds_per_token(best_gamma, n)
        n += step.n_accepted + 1
    return s / b - 1


class TodayCache:
    def __init__(self):
        self.g = CacheGovernor()

    def choose(self):
        return 0 if self.g.choice.on else 1

    def observe(self, t, s):
        self.g.observe(t, s)


class CoreCache:
    def __init__(self):
        self.c = Online(2, RATIO[:17], settle=[8, 1], drafts=False)

    def choose(self):
        return self.c.choose()[0]

    def observe(self, t, s):
        self.c.now = (self.c.now[0], t - 1)
        self.c.observe(t - 1, 0, 0.0, s)


class SketchCache:
    def __init__(self):
        self.c = Sketch(2, 3, drafts=False)

    def choose(self):
        return self.c.choose()[0]

    def observe(self, t, s):
        self.c.observe(t - 1, 0, 0.0, s)


def cache_regret(gain, make, seed, noise=0.1, n_steps=1000):
    rng, gov = np.random.default_rng(seed), make()
    trace, always = tc.Trace(gain, noise), tc.Trace(gain, noise)
    s = a = v = 0.0
    for n in range(n_steps):
        t = 1 + n % 3
        on = gov.choose() == 0
        m, w, wo = trace.step(n, t, on, rng)
        _, aw, _ = always.step(n, t, True, np.random.default_rng(n))
        gov.observe(t, m)
        s += w if on else wo
        a += aw
        v += wo
    return s / min(a, v) - 1


def layers(rule, rng, true, noise):
    """Seconds lost per step by the chosen split, relative; and steps measured. Each session's steps scatter by `noise`, sessions by 3 %."""
    session = [math.exp(rng.normal(0, 0.03)) for _ in true]
    if rule == "today":
        found = []
        for t, x in zip(true, session):
            times = sorted(t * x * math.exp(rng.normal(0, noise)) for _ in range(32))
            found.append(np.mean(times[:29]))
        return true[int(np.argmin(found))] / min(true) - 1, 32 * len(true)
    means, n = [], 0  # one estimate: 8 steps each, then 8 more of those within 2 deviations of the best, to 64
    logs = [[] for _ in true]
    alive = list(range(len(true)))
    for _ in range(8):
        for i in alive:
            logs[i] += [math.log(true[i] * session[i]) + rng.normal(0, noise) for _ in range(8)]
            n += 8
        m = {i: np.mean(logs[i]) for i in alive}
        best = min(m, key=m.get)
        alive = [i for i in alive if m[i] - m[best] <= 2 * noise * math.sqrt(2 / len(logs[i]))]
        if len(alive) == 1:
            break
    return true[min(alive, key=lambda i: np.mean(logs[i]))] / min(true) - 1, n


if __name__ == "__main__":
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 6)
    makes = {"today": Today, "core": lambda: Online(1, RATIO), "sketch": lambda: Sketch(1, GAMMA_MAX + 1)}
    streams = {**tg.TRACES, "code after prose": tg.CODE_AFTER_PROSE, "cold": tg.COLD, **dict(surfaces())}
    for name, trace in streams.items():
        print(
            f"draft  {name:18}",
            tg.best_fixed(trace)[0],
            *(f"{k} {100 * np.mean([draft_regret(trace, m, s) for s in seeds]):6.1f} %" for k, m in makes.items()),
            flush=True,
        )
    makes = {"today": TodayCache, "core": CoreCache, "sketch": SketchCache}
    for name, gain, noise, n in (
        ("pays 2.0", lambda n: 2.0, 0.1, 1000),
        ("pays 1.1", lambda n: 1.1, 0.1, 1000),
        ("loses 0.9", lambda n: 0.9, 0.1, 1000),
        ("loses 0.5", lambda n: 0.5, 0.1, 1000),
        ("even, noise", lambda n: 1.0, 0.25, 1000),
        ("loses .7, noise", lambda n: 0.7, 0.25, 1000),
        ("pays 1.4, noise", lambda n: 1.4, 0.25, 1000),
        ("text changes", lambda n: 0.8 if n < 600 else 1.6, 0.1, 3000),
    ):
        print(
            f"cache  {name:18}",
            *(
                f"{k} {100 * np.mean([cache_regret(gain, m, s, noise, n) for s in seeds]):6.1f} %"
                for k, m in makes.items()
            ),
            flush=True,
        )
    for true in ((1, 1.02, 1.04), (1, 1.05, 1.1), (1, 1.2, 1.5)):
        for noise in (0.05, 0.15, 0.3):
            row = {}
            for rule in ("today", "core"):
                rng = np.random.default_rng(0)
                got = [layers(rule, rng, true, noise) for _ in range(400)]
                row[rule] = (100 * np.mean([g[0] for g in got]), np.mean([g[1] for g in got]))
            print(
                f"layers {true} noise {noise}",
                *(f"{k} {r:.2f} % in {n:.0f} steps" for k, (r, n) in row.items()),
                flush=True,
            )
