"""What a pair does on held-back prompts: answers right, drafts accepted, which experts the answers used."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from models.generator import DOMAINS, Chat, held_back, render_prompt, score
from models.llama_runner import RoutingTap, Runner, Speculation, speculate

MAX_ANSWER_TOKENS = 160
HOT_SHARE = 0.17  # of each layer's experts: the cache of MoE-SpAc's experiments
WINDOW = 4  # consecutive tokens whose different experts are counted
WHO = "Who are you?"


@dataclass
class DomainResult:
    """One domain's figures; shares are between 0 and 1."""

    chats: int = 0
    right: float = 0.0  # chats with every turn right, the model's own answers staying in the context
    finished: float = 0.0  # chats whose answers all ended by themselves
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    tokens: int = 0
    covers: dict[str, float] = field(default_factory=dict)  # share of each domain's picks in this one's hot experts

    @property
    def acceptance(self) -> float:
        return self.accepted / max(1, self.drafted)


@dataclass
class Result:
    """All figures of one evaluation."""

    gamma: int
    file_bytes: int
    who: str  # the answer to WHO
    overlap: float = 0.0  # experts shared by adjacent answer tokens, mean over layers, as a share of k
    unique_of_4: float = 0.0  # different experts of 4 consecutive answer tokens, relative to uniform routing
    domains: dict[str, DomainResult] = field(default_factory=dict)

    @property
    def acceptance(self) -> float:
        return sum(d.accepted for d in self.domains.values()) / max(1, sum(d.drafted for d in self.domains.values()))

    @property
    def tokens_per_step(self) -> float:
        return sum(d.tokens for d in self.domains.values()) / max(1, sum(d.steps for d in self.domains.values()))

    @property
    def mean_right(self) -> float:
        return float(np.mean([d.right for d in self.domains.values()]))


def converse(
    target: Runner, draft: Runner, chat: Chat, gamma: int, record: Speculation
) -> tuple[bool, bool, list[int]]:
    """Run a chat on the model's own answers; return: all right, all ended, the last text's ids."""
    messages: list[tuple[str, str]] = [("system", chat.system)] if chat.system is not None else []
    right = ended = True
    ids: list[int] = []
    for i, turn in enumerate(chat.turns):
        messages.append(("user", turn.user))
        prompt = target.encode(render_prompt(messages))
        answer = speculate(target, draft, prompt, gamma, MAX_ANSWER_TOKENS, record)
        text = target.decode_text(answer)
        right &= score(chat, i, text)
        ended &= len(answer) < MAX_ANSWER_TOKENS
        messages.append(("assistant", text))
        ids = prompt + answer
    return right, ended, ids


def shared_experts(table: np.ndarray) -> float:
    """Mean share of experts that a token has in common with the one before it. table: (n_layers, n, k) ids."""
    now, before = table[:, 1:, :, None], table[:, :-1, None, :]
    return float((now == before).any(-1).mean())


def unique_ratio(table: np.ndarray, n_expert: int, window: int = WINDOW) -> float:
    """Different experts in `window` consecutive tokens over those of uniform routing. table: (n_layers, n, k)."""
    k = table.shape[2]
    uniform = n_expert * (1 - (1 - k / n_expert) ** window)
    counts = [len(np.unique(layer[i : i + window])) for layer in table for i in range(len(layer) - window + 1)]
    return float(np.mean(counts)) / uniform


def coverage(profile: np.ndarray, picks: np.ndarray, share: float = HOT_SHARE) -> float:
    """Share of `picks` that fall on the experts that `profile` makes hot. Both: (n_layers, n_experts) counts."""
    n_hot = round(share * profile.shape[1])
    hot = np.argpartition(-profile, n_hot, axis=1)[:, :n_hot]
    return float(np.take_along_axis(picks, hot, axis=1).sum() / picks.sum())


def measure(target_path: Path, draft_path: Path, gamma: int, n_scored: int) -> Result:
    """`n_scored` held-back chats of every domain through llama.cpp, greedy, with chain drafts of length `gamma`."""
    tap = RoutingTap()
    overlaps: list[float] = []
    uniques: list[float] = []
    halves: dict[str, list[np.ndarray]] = {}  # domain -> expert counts of every other chat, and of the rest
    with Runner(target_path) as target, Runner(draft_path) as draft, Runner(target_path, tap=tap) as watched:
        file_bytes = target_path.stat().st_size + draft_path.stat().st_size
        prompt = target.encode(render_prompt([("user", WHO)]))
        who = target.decode_text(speculate(target, draft, prompt, gamma, MAX_ANSWER_TOKENS, Speculation()))
        result = Result(gamma, file_bytes, who)
        n_expert = target.n_expert
        for domain in DOMAINS:
            record, rights, endings = Speculation(), [], []
            halves[domain] = [np.zeros(0), np.zeros(0)]
            for i, chat in enumerate(tqdm(held_back(n_scored, 1, domain), desc=domain)):
                right, ended, ids = converse(target, draft, chat, gamma, record)
                rights.append(right)
                endings.append(ended)
                watched.cut(0)
                watched.eval(ids)
                n_answer = len(record.answers[-1])
                table = np.stack([tap.ids[layer] for layer in sorted(tap.ids)])  # (n_layers, n, k)
                counts = np.stack([np.bincount(layer.ravel(), minlength=n_expert) for layer in table])
                halves[domain][i % 2] = counts + (halves[domain][i % 2] if halves[domain][i % 2].size else 0)
                if n_answer > 1:
                    overlaps.append(shared_experts(table[:, -n_answer:]))
                if n_answer >= WINDOW:
                    uniques.append(unique_ratio(table[:, -n_answer:], n_expert))
            result.domains[domain] = DomainResult(
                chats=len(rights),
                right=float(np.mean(rights)),
                finished=float(np.mean(endings)),
                drafted=record.drafted,
                accepted=record.accepted,
                steps=record.steps,
                tokens=record.tokens,
            )
    result.overlap, result.unique_of_4 = float(np.mean(overlaps)), float(np.mean(uniques))
    for domain, (profiled, _) in halves.items():
        result.domains[domain].covers = {other: coverage(profiled, seen) for other, (_, seen) in halves.items()}
    return result
