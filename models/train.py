"""Train the bundled pair: `python -m models.train target`, then `python -m models.train draft`.

The target grows: a shallow stack is trained first (cheap), then each layer is followed by silent copies and all 48
layers are trained on. Interrupted runs go on from the last checkpoint in the work folder.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from models import trainer
from models.generator import IM_END, IM_START, chats, long_chats, render_chat
from models.network import DRAFT_SHAPE, TARGET_SHAPE, Network, grow
from models.tokenizer import load_or_train

SHALLOW_LAYERS = 12
N_TIME = 256  # tokens per row
N_ROWS = 16  # rows per step
LONG_FROM = 99  # step of the deep stage from which
LONG_EVERY, LONG_ROWS, LONG_TIME = 6, 3, 1536  # one step in six has few, long rows instead
PROMPT_WEIGHT = 0.1  # loss weight of tokens that the model only reads; answers weigh 1

# Weights of the two routing losses, means over layers: load imbalance, and change of routing from token to token. While
# shallow, all experts get their share of the text; when deep, neighbours are drawn together, so that experts specialise
# by context, as those of large models do.
SHALLOW_ROUTING = (0.01, 0.0)
DEEP_ROUTING = (0.01, 0.2)


def answer_weights(ids: np.ndarray, im_start: int, im_end: int, assistant: int) -> np.ndarray:
    """Loss weight per token: 1 for an assistant's text and its end mark, PROMPT_WEIGHT elsewhere. ids: (n,)."""
    weights = np.full(ids.shape, PROMPT_WEIGHT, dtype=np.float32)
    inside = False
    for i, token in enumerate(ids):
        if inside and i > 0 and ids[i - 1] != im_start:
            weights[i] = 1.0
        if token == im_start:
            inside = i + 1 < len(ids) and ids[i + 1] == assistant
        elif token == im_end:
            inside = False
    return weights


def batch(tokenizer: Tokenizer, seed: str, step: int, n_rows: int, n_time: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets (both (n_rows, n_time) int64) and loss weights (float32) of one step, always the same.

    Rows of LONG_TIME tokens or more start with a very long question.
    """
    stream = chats(f"{seed}-{step}")
    long_stream = long_chats(f"{seed}-{step}")
    im_start, im_end, assistant = (tokenizer.encode(text).ids[0] for text in (IM_START, IM_END, "assistant"))
    rows, weights = [], []
    for _ in range(n_rows):
        ids: list[int] = []
        if n_time >= LONG_TIME:
            ids += tokenizer.encode(render_chat(next(long_stream))).ids
        while len(ids) < n_time + 1:  # every row starts with the start of a chat; the last chat may be truncated
            ids += tokenizer.encode(render_chat(next(stream))).ids
        row = np.array(ids[: n_time + 1])
        rows.append(row)
        weights.append(answer_weights(row, im_start, im_end, assistant))
    table, weight = torch.from_numpy(np.stack(rows)), torch.from_numpy(np.stack(weights))
    return table[:, :-1].contiguous(), table[:, 1:].contiguous(), weight[:, 1:].contiguous()


def rows_at(step: int, long_from: int | None) -> tuple[int, int]:
    """Rows and tokens per row of a step; from step `long_from` on, every LONG_EVERY-th step has long rows."""
    is_long = long_from is not None and step >= long_from and step % LONG_EVERY == LONG_EVERY - 1
    return (LONG_ROWS, LONG_TIME) if is_long else (N_ROWS, N_TIME)


def on(net: Network, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors where the network is."""
    return tuple(tensor.to(net.embed.weight.device) for tensor in tensors)


def plain_loss(
    tokenizer_path: Path,
    seed: str,
    routing: tuple[float, float] = SHALLOW_ROUTING,
    long_from: int | None = None,
) -> trainer.LossFunction:
    """Weighted next-token cross-entropy plus the routing losses."""
    tokenizer = load_or_train(tokenizer_path)

    def loss_at(net: Network, step: int) -> tuple[Tensor, dict[str, float]]:
        inputs, targets, weights = on(net, batch(tokenizer, seed, step, *rows_at(step, long_from)))
        hidden, (balance, change) = net(inputs)
        each = F.cross_entropy(net.logits(hidden).flatten(0, 1), targets.flatten(), reduction="none")
        weights = weights.flatten()
        loss = (each * weights).sum() / weights.sum()
        answer = each[weights == 1].mean()
        return loss + routing[0] * balance + routing[1] * change, {
            "loss": round(loss.item(), 4),
            "answer_loss": round(answer.item(), 4),
            "balance": round(balance.item(), 3),
            "change": round(change.item(), 3),
        }

    return loss_at


def distil_loss(tokenizer_path: Path, teacher: Network, seed: str) -> trainer.LossFunction:
    """KL divergence from the target's distribution, every token of answers counted fully, prompts a little."""
    tokenizer = load_or_train(tokenizer_path)

    def loss_at(net: Network, step: int) -> tuple[Tensor, dict[str, float]]:
        inputs, _, weights = on(net, batch(tokenizer, seed, step, *rows_at(step, 0)))
        with torch.no_grad():
            wanted = teacher.logits(teacher(inputs)[0]).log_softmax(dim=-1)  # (B, T, V)
        got = net.logits(net(inputs)[0]).log_softmax(dim=-1)
        each = F.kl_div(got, wanted, reduction="none", log_target=True).sum(dim=-1)  # (B, T)
        agree = (got.argmax(-1) == wanted.argmax(-1))[weights == 1].float().mean()
        loss = (each * weights).sum() / weights.sum()
        return loss, {
            "loss": round(loss.item(), 4),
            "answer_loss": round(each[weights == 1].mean().item(), 4),
            "agree": round(agree.item(), 4),
        }

    return loss_at


def keep_freed_memory() -> None:
    """Tell glibc to reuse large freed blocks: handing them back costs a page fault per 4 KiB, half of a step's time."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def train_target(args: argparse.Namespace) -> None:
    """Shallow stage, growth, full stage."""
    loss_at = plain_loss(args.work / "tokenizer.json", f"target-{args.seed}")
    shallow = Network(replace(TARGET_SHAPE, n_layer=SHALLOW_LAYERS))
    plan = trainer.TrainingPlan("target-shallow", args.shallow_steps, args.lr, decay_share=0.0)
    shallow = trainer.run(shallow, plan, loss_at, args.work, args.device)
    deep = grow(shallow, TARGET_SHAPE.n_layer, args.seed)
    loss_deep = plain_loss(args.work / "tokenizer.json", f"target-deep-{args.seed}", DEEP_ROUTING, LONG_FROM)
    trainer.run(deep, trainer.TrainingPlan("target", args.steps, args.deep_lr), loss_deep, args.work, args.device)


def train_draft(args: argparse.Namespace) -> None:
    """Plain text first (cheap), then the target's own distribution."""
    draft = Network(DRAFT_SHAPE)
    loss_at = plain_loss(args.work / "tokenizer.json", f"draft-{args.seed}")
    plan = trainer.TrainingPlan("draft-plain", args.draft_plain_steps, args.lr, decay_share=0.15)
    draft = trainer.run(draft, plan, loss_at, args.work, args.device)
    if args.draft_steps:
        teacher = trainer.load(args.work / "target.pt")
        loss_at = distil_loss(args.work / "tokenizer.json", teacher.to(args.device), f"distil-{args.seed}")
        trainer.run(
            draft, trainer.TrainingPlan("draft", args.draft_steps, args.deep_lr), loss_at, args.work, args.device
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("what", choices=("target", "draft"))
    parser.add_argument("--work", type=Path, default=Path("build/models"), help="folder of checkpoints and logs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shallow-steps", type=int, default=9500)
    parser.add_argument("--steps", type=int, default=750)
    parser.add_argument("--draft-plain-steps", type=int, default=2200)
    parser.add_argument("--draft-steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--deep-lr", type=float, default=2e-3)
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=best, help="of PyTorch")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    {"target": train_target, "draft": train_draft}[args.what](args)


if __name__ == "__main__":
    main()
