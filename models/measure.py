"""What a pair does on held-back prompts: answers right, drafts accepted, which experts the answers used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from models.generator import DOMAINS, Chat, Turn, held_back, score
from models.generator.base import contains
from moeedge.analysis.profile import layer_curves
from moeedge.analysis.routing_curves import mean_curves
from moeedge.engine.answer import Answer
from moeedge.engine.recording import TraceCollector
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.experts import count_ids
from moeedge.records import filled
from moeedge.trace.format import Trace, TraceMeta

MAX_ANSWER_TOKENS = 160
N_CTX = 1024
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


def converse(session: Session, collector: TraceCollector, chat: Chat, **description: str) -> list[Answer]:
    """The greedy answers to a chat's turns, which stay in the context; description: of the texts in the trace."""
    session.reset()
    messages = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    answers: list[Answer] = []
    for turn in chat.turns:
        messages.append({"role": "user", "content": turn.user})
        prompt = session.model.chat_tokens(messages)
        answer = session.generate(prompt, n_predict=MAX_ANSWER_TOKENS, sampling=SamplingConfig(temperature=0))
        collector.begin(prompt, description)
        for _ in answer.pieces():
            pass
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text})
    return answers


def domain_result(chats: Sequence[Chat], answers: Sequence[Sequence[Answer]]) -> DomainResult:
    """The figures of a domain's chats without their experts."""
    pairs = list(zip(chats, answers, strict=True))
    stats = [answer.stats for chat in answers for answer in chat]
    return DomainResult(
        chats=len(chats),
        right=float(np.mean([all(score(chat, i, each.text) for i, each in enumerate(own)) for chat, own in pairs])),
        finished=float(np.mean([all(each.stop_reason == "eos" for each in own) for own in answers])),
        drafted=sum(each.drafted for each in stats),
        accepted=sum(each.accepted for each in stats),
        steps=sum(each.steps for each in stats),
        tokens=sum(each.generated_tokens for each in stats),
    )


def coverage(profile: np.ndarray, picks: np.ndarray, share: float = HOT_SHARE) -> float:
    """Share of `picks` that fall on the experts that `profile` makes hot. Both: (n_layers, n_experts) counts."""
    n_hot = round(share * profile.shape[1])
    hot = np.argpartition(-profile, n_hot, axis=1)[:, :n_hot]
    return float(np.take_along_axis(picks, hot, axis=1).sum() / picks.sum())


def expert_counts(trace: Trace, category: str, half: str) -> np.ndarray:
    """How often the chats of a domain, every other one, use each expert: (n_layers, n_experts)."""
    wanted = {"category": category, "half": half}
    texts = [number for number, text in enumerate(trace.meta.parameters["texts"]) if text == wanted]
    rows = trace.accepted & np.isin(trace.sequence, texts)
    ids = np.stack([trace.layer_ids(layer)[rows] for layer in range(trace.meta.n_layers)])
    return count_ids(ids, trace.meta.n_experts)


def measure(target: Path, draft: Path, gamma: int, n_scored: int) -> Result:
    """`n_scored` held-back chats of every domain, answered greedily on the CPU with drafts of `gamma` tokens."""
    config = EngineConfig(model=target, draft=draft, gamma=gamma, n_ctx=N_CTX, device="none")
    with Session.open(config) as session:
        collector = TraceCollector(filled(TraceMeta, session.info))
        session.observers.append(collector)
        (who,) = converse(session, collector, Chat("who", (Turn(WHO, "", contains("toy model")),)))
        result = Result(gamma, target.stat().st_size + draft.stat().st_size, who.text)
        for domain in DOMAINS:
            chats = held_back(n_scored, 1, domain)
            answers = [
                converse(session, collector, chat, category=domain, half=str(i % 2))
                for i, chat in enumerate(tqdm(chats, desc=domain))
            ]
            result.domains[domain] = domain_result(chats, answers)
    trace = collector.trace()
    mean = mean_curves([layer_curves(trace, layer, trace.text_rows()) for layer in trace.expert_layers()])
    assert mean is not None
    result.overlap = mean.overlap[1] or 0.0
    result.unique_of_4 = (mean.unique[WINDOW] or 0.0) / mean.unique_uniform[WINDOW]
    seen = {domain: expert_counts(trace, domain, "1") for domain in DOMAINS}
    for domain, own in result.domains.items():
        profiled = expert_counts(trace, domain, "0")
        own.covers = {other: coverage(profiled, picks) for other, picks in seen.items()}
    return result
