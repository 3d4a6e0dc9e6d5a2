"""Batches of token ids for training: chats packed into rows, made on the fly from (seed, step)."""

from __future__ import annotations

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.generator import IM_END, IM_START, chats, long_chats, render_chat

LONG_TIME = 1024
PROMPT_WEIGHT = 0.1  # loss weight of tokens that the model only reads; answers weigh 1


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
