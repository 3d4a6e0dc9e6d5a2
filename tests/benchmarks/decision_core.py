"""One core: arms (a setting, a number of tokens), one estimate of log T(arm, tokens), one rule paid from one credit."""

import math
import numpy as np
from moeedge import speculation
from moeedge.scheduler.governor import AcceptanceByPosition, gain_of_better, GAMMA_MAX


class Estimate:
    """Kalman filter of log T(arm, t): a shape shared by all arms, a level, and an offset for each arm."""

    LEVEL, SLOPE, BEND, OWN = 3.0, 0.3, 0.14, 0.06
    FORGET, GAIN, CLIP, OFFSET = 0.0005, 0.15, 2.0, 0.3

    def __init__(self, n_arms, ratio, offset_drift=0.0002):
        n = len(ratio)
        log_t = np.log(np.arange(1, n + 1))
        prior = np.log([speculation.verification_ratio(0.5, r) for r in ratio])
        shape = (
            self.SLOPE**2 * np.outer(log_t, log_t)
            + self.BEND**2 * np.minimum.outer(log_t, log_t)
            + self.OWN**2 * np.eye(n)
        )
        self.n, self.n_arms = n, n_arms
        ones = np.ones((n_arms, n_arms))
        self.shape = np.kron(ones, shape)
        self.offset = np.kron(np.eye(n_arms), np.ones((n, n)))
        self.cov = self.shape + self.LEVEL**2 + (self.OFFSET**2 * self.offset if n_arms > 1 else 0)
        self.mean = np.tile(prior, n_arms)
        self.noise, self.count, self.drift = 0.04, 0, offset_drift

    def observe(self, arm, t, seconds, weight=1.0):
        i = arm * self.n + t - 1
        if self.count == 0:
            self.mean += math.log(seconds) - self.mean[i]
        self.count += 1
        self.cov += self.FORGET * self.shape + self.GAIN * self.noise
        if self.n_arms > 1:
            self.cov += self.drift * self.offset
        row = self.cov[i].copy()
        var = row[i] + self.noise
        surprise = math.log(seconds) + self.noise / 2 - self.mean[i]
        clip = self.CLIP * math.sqrt(var)
        surprise = min(max(surprise, -clip), clip)
        expected = row[i]
        self.mean += row * (surprise / var)
        self.cov -= np.outer(row, row) / var
        self.noise = max(0.03**2, self.noise + 0.04 * (max(surprise**2 - expected, 0.0) - self.noise))

    def forget_offsets(self, variance):
        self.cov += variance * self.offset

    def seconds(self):
        return np.maximum.accumulate(np.exp(self.mean).reshape(self.n_arms, self.n), axis=1)

    def relative(self, arm, t):
        i = arm * self.n + t - 1
        d = self.cov.diagonal() + self.cov[i, i] - 2 * self.cov[i]
        return np.maximum(d, 0).reshape(self.n_arms, self.n)


class Online:
    """The arm and draft length of the next step. settle: unmeasured steps after a change to an arm, by arm."""

    SHARE, CREDIT, HYST, HORIZON, N_TRIALS = 0.02, 2.0, 0.01, 35, (1, 2, 4, 8)
    ARM_HORIZON, RUN, ARM_CREDIT, MOST = 1000, 5, 4.0, 16.0

    def __init__(self, n_arms, ratio, settle=None, gammas=range(GAMMA_MAX + 1), warm=32, drafts=True):
        self.est, self.acc = Estimate(n_arms, ratio), AcceptanceByPosition(GAMMA_MAX)
        self.settle = settle or [0] * n_arms
        self.gammas, self.drafts, self.warm = list(gammas), drafts, warm
        self.best, self.arm, self.run, self.skips = (0, 2 if drafts else 0), 0, 0, 1
        self.n_steps = self.since = 0
        self.credit = self.arm_credit = None
        self.trial, self.draft_s, self.n_draft = False, 0.0, 0

    def steps(self):
        s = self.est.seconds()
        d = self.draft_s if self.n_draft else 0.1 * s[0, 0]
        return s + d * np.arange(s.shape[1])

    def choose(self):
        if self.n_steps < 3 and self.drafts:
            self.now = (self.arm, (2, 0, 4)[self.n_steps])
            return self.now
        tokens = np.array(self.acc.tokens()) if self.drafts else np.ones(self.est.n)
        step = self.steps()
        rate = tokens / step if self.drafts else 1 / step
        self.trial = False
        if self.run:
            self.now = (self.arm, self.best[1])
            self.trial = True
            return self.now
        g_range = self.gammas if self.drafts else [self.best[1]]
        r_arm = {a: max(g_range, key=lambda g: rate[a, g]) for a in range(self.est.n_arms)}
        a = self.best[0]
        g = r_arm[a]
        if rate[a, g] > (1 + self.HYST) * rate[a, self.best[1]]:
            self.best = (a, g)
        a, g = self.best
        var = self.est.relative(a, g + 1)
        unit = step[a, g]
        # another arm: beyond doubt, or a run of trials
        for b in range(self.est.n_arms):
            if b == a:
                continue
            adv, dev = math.log(rate[b, g] / rate[a, g]), math.sqrt(var[b, g])
            if adv - dev > 0.02:
                self.best, self.arm, self.skips = (b, g), b, max(1, self.settle[b])
                self.now = self.best
                return self.now
            cost = (self.settle[b] + self.RUN) * unit * max(math.expm1(-adv), 0)
            if (
                self.n_steps >= self.warm
                and 0.8 * dev + adv > 0.02
                and self.arm_credit is not None
                and cost <= self.arm_credit
            ):
                self.arm, self.run, self.skips, self.cost = b, self.settle[b] + self.RUN, self.settle[b], 0.0
                self.now, self.trial = (b, g), True
                return self.now
        self.arm = a
        self.now = (a, g)
        if self.drafts and self.since >= 1:
            most = 0.0
            for h in range(min(2 * g + 4, GAMMA_MAX + 1)):
                if h == g:
                    continue
                cost_s = max(step[a, h] - tokens[h] / rate[a, g], 0)
                if h and cost_s > (self.credit or 0):
                    continue
                v = max(var[a, h], 1e-9)
                raised = self.acc.raised_tokens(1.0)
                if h > g:
                    v += (math.log(raised[h] / tokens[h]) - math.log(raised[g] / tokens[g])) ** 2
                adv = math.log(rate[a, h] / rate[a, g])
                for k in self.N_TRIALS:
                    dev = math.sqrt(v * k * v / (k * v + self.est.noise))
                    worth = self.HORIZON * dev * gain_of_better(adv / dev) / k - cost_s / unit
                    if worth > most:
                        self.now, most, self.trial = (a, h), worth, True
        return self.now

    def observe(self, n_drafted, n_accepted, draft_s, target_s):
        self.n_steps += 1
        arm = self.now[0]
        self.since = 0 if self.trial else self.since + 1
        if self.drafts:
            self.acc.observe(n_drafted, n_accepted)
        expected = float(self.est.seconds()[self.best[0], n_drafted])
        if self.run:
            self.run -= 1
            self.cost += target_s - expected
            if self.run == 0:
                self.arm_credit -= self.cost
                self.arm = self.best[0]
                if not self.skips:
                    self.est.observe(arm, n_drafted + 1, target_s)
                self.skips = max(1, 0)
                return
        if self.skips:
            self.skips -= 1
            return
        self.est.observe(arm, n_drafted + 1, target_s)
        if n_drafted:
            self.n_draft += 1
            self.draft_s += (draft_s / n_drafted - self.draft_s) / min(self.n_draft, 30)
        step = self.steps()
        unit = step[arm, 0]
        if self.credit is None:
            self.credit, self.arm_credit = self.CREDIT * unit, self.ARM_CREDIT * unit
        if self.trial and not self.run:
            self.credit -= max(step[arm, n_drafted] - 0, 0) * 0 + max(draft_s + target_s - step[self.best], 0)
        self.credit = min(self.CREDIT * unit, self.credit + self.SHARE * (draft_s + target_s))
        self.arm_credit = min(self.MOST * unit, self.arm_credit + self.SHARE * target_s)


class Sketch:
    """shared/sketches/tuning.py: decayed means by cell, neighbours lend, a hopeful arm is tried from a credit."""

    def __init__(self, n_arms, n, settle=None, drafts=True, warm=32):
        self.cells, self.arms = {}, [(a, g) for a in range(n_arms) for g in range(n if drafts else 1)]
        self.acc, self.credit, self.drafts, self.n_steps = AcceptanceByPosition(GAMMA_MAX), 0.0, drafts, 0
        self.draft_s = 0.0
        self.now = (0, 0)

    def _seconds(self, arm, t):
        known = sorted((abs(n - t), n) for a, n in self.cells if a == arm)
        if not known:
            return math.inf, math.inf
        distance, n = known[0]
        weight, mean, variance = self.cells[arm, n]
        return mean * (t / n) ** 0.5, math.sqrt(variance / weight) + 0.1 * distance * mean

    def choose(self):
        tokens = self.acc.tokens()
        tok = (lambda g: tokens[g]) if self.drafts else (lambda g: 1.0)
        s = {arm: self._seconds(arm[0], arm[1] + 1) for arm in self.arms}
        rate = {arm: tok(arm[1]) / (s[arm][0] + arm[1] * self.draft_s) for arm in self.arms}
        best = max(rate, key=rate.__getitem__)
        self.now = best
        for arm in self.arms:
            mean, error = s[arm]
            total = mean + arm[1] * self.draft_s
            hopeful = tok(arm[1]) / max(total - 2 * error, 1e-9) if math.isfinite(mean) else math.inf
            cost = 0.0 if math.isinf(mean) else total - tok(arm[1]) / rate[best]
            if arm != best and hopeful > rate[best] * 1.05 and cost <= self.credit:
                self.credit -= max(cost, 0.0)
                self.now = arm
                break
        self.trial = self.now != best
        return self.now

    def observe(self, n_drafted, n_accepted, draft_s, target_s):
        if self.drafts:
            self.acc.observe(n_drafted, n_accepted)
        key = (self.now[0], n_drafted + 1)
        weight, mean, variance = self.cells.get(key, [0.0, target_s, 0.0])
        weight = weight * 0.5 ** (1 / 32) + 1.0
        delta = target_s - mean
        mean += delta / weight
        self.cells[key] = [weight, mean, variance + (delta * delta - variance) / weight]
        if n_drafted:
            self.draft_s = draft_s / n_drafted
        self.credit += 0.02 * (target_s + draft_s)
