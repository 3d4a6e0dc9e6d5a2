"""Shared by several files: a model with many experts, one architecture's models, loaded once, and stock's contexts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from moeedge.llama import library
from moeedge.llama.model import Model
from tests.conftest import TinyFactory
from tests.support.cases import case_model
from tests.support.hybrid import MANY_EXPERTS, hybrid_config
from tests.support.stock import StockContext

PROMPT = np.random.default_rng(4).integers(0, 256, 10).tolist() * 2  # copies: n-gram lookup has something to find
LONG_PROMPT = np.random.default_rng(4).integers(0, 256, 40).tolist()  # long enough for llama.cpp's op offload


@pytest.fixture(scope="session")
def many(tiny: TinyFactory) -> Path:
    """A qwen3moe target with MANY_EXPERTS experts."""
    return tiny("qwen3moe", experts=MANY_EXPERTS)


@pytest.fixture(scope="module")
def stock(many: Path) -> Iterator[StockContext]:
    """Stock's context on the CPU with that model."""
    library.start()
    with StockContext(many, n_ctx=512) as context:
        yield context


@dataclass
class Loaded:
    """One case's models, loaded once, and stock's context."""

    path: Path
    draft_path: Path
    model: Model
    draft: Model
    stock: StockContext


def each_case(
    names: Collection[str],
    name: str = "",
    values: Collection[object] = (),
    *,
    quick: Collection[object] = (),
    slowly: Collection[object] = (),
    in_turn: bool = False,
    slow: Collection[str] = (),
) -> pytest.MarkDecorator:
    """Runs a test for these cases, whose models stay loaded from one test of a module to the next.

    name, values: another parameter. The first case runs with all of its values, the others with those in `quick`, and
    slowly with those in `slowly`; in_turn: each value that is left with one of the others, slowly. slow: cases of which
    all of this is slow.
    """
    first, *others = names
    if not name:
        return pytest.mark.parametrize("loaded", [first, *others], indirect=True, scope="module")
    pairs = []
    for i, case in enumerate((first, *others)):
        for j, value in enumerate(values):
            is_chosen = value in quick or value in slowly or (in_turn and j % len(others) == i - 1)
            is_slow = case != first and (value not in quick or case in slow)
            if case == first or is_chosen:
                marks = pytest.mark.slow if is_slow else ()
                pairs.append(pytest.param(case, value, id=f"{value}-{case}", marks=marks))
    return pytest.mark.parametrize(("loaded", name), pairs, indirect=["loaded"], scope="module")


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, tiny: TinyFactory, tiny_draft: Path) -> Iterator[Loaded]:
    """Of the case that `each_case` names, with MANY_EXPERTS experts."""
    library.start()
    path = case_model(tiny, request.param, experts=MANY_EXPERTS)
    with ExitStack() as stack:
        stock = stack.enter_context(StockContext(path, n_ctx=512))
        config = hybrid_config(path, tiny_draft, 0.5)
        model = stack.enter_context(Model.load(path, device=config.device))
        draft = stack.enter_context(Model.load(tiny_draft, device=config.device))
        yield Loaded(path, tiny_draft, model, draft, stock)
