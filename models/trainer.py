"""The training loop shared by target and draft: schedule, optimiser, checkpoints, progress."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from models.network import Network, Shape

LossFunction = Callable[[Network, int], tuple[Tensor, dict[str, float]]]


@dataclass(frozen=True)
class TrainingPlan:
    """One stage of training."""

    name: str  # of the checkpoint and of the log
    steps: int
    peak_lr: float
    warmup_steps: int = 100
    decay_share: float = 0.3  # the last share of the steps: learning rate falls linearly to zero
    weight_decay: float = 0.02
    save_every_s: float = 120.0


def learning_rate(plan: TrainingPlan, step: int) -> float:
    """Linear warm-up, a plateau, a linear fall."""
    rise = min(1.0, (step + 1) / plan.warmup_steps)
    fall = min(1.0, (plan.steps - step) / max(1.0, plan.steps * plan.decay_share))
    return plan.peak_lr * min(rise, fall)


def make_optimiser(net: Network, plan: TrainingPlan) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    matrices = [p for p in net.parameters() if p.dim() >= 2]
    vectors = [p for p in net.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.peak_lr, betas=(0.9, 0.98), eps=1e-9, fused=True)


def save(path: Path, net: Network, optimiser: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint atomically: the old one stays until the new one is complete."""
    part = path.with_suffix(".part")
    state = {"shape": asdict(net.shape), "model": net.state_dict(), "step": step, "optimiser": optimiser.state_dict()}
    torch.save(state, part)
    os.replace(part, path)


def load(path: Path) -> Network:
    """The network of a checkpoint."""
    state = torch.load(path, weights_only=True, map_location="cpu")
    net = Network(Shape(**state["shape"]))
    net.load_state_dict(state["model"])
    return net


def run(net: Network, plan: TrainingPlan, loss_at: LossFunction, work: Path, device: str = "cpu") -> Network:
    """Train until `plan.steps`, from the stage's checkpoint if there is one. The log has one JSON object per step.

    A run that is stopped goes on from the checkpoint, which is at most `plan.save_every_s` old.
    """
    path = work / f"{plan.name}.pt"
    first, optimiser_state = 0, None
    if path.exists():
        state = torch.load(path, weights_only=True, map_location="cpu")
        net.load_state_dict(state["model"])
        first, optimiser_state = state["step"], state["optimiser"]
    net = net.to(device)
    optimiser = make_optimiser(net, plan)
    if optimiser_state:
        optimiser.load_state_dict(optimiser_state)
    saved = time.monotonic()
    with (
        (work / f"{plan.name}.jsonl").open("a") as log,
        tqdm(total=plan.steps, initial=first, desc=plan.name, mininterval=10) as bar,
    ):
        for step in range(first, plan.steps):
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(plan, step)
            loss, facts = loss_at(net, step)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            log.write(
                json.dumps({"step": step, **facts, "grad_norm": round(float(norm), 4), "time": round(time.time(), 1)})
                + "\n"
            )
            log.flush()
            bar.set_postfix(facts, refresh=False)
            bar.update()
            if time.monotonic() - saved > plan.save_every_s:
                save(path, net, optimiser, step + 1)
                saved = time.monotonic()
    save(path, net, optimiser, plan.steps)
    return net
