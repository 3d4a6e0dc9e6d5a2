"""Shared by several files: the models of one architecture, loaded once, and stock's answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from moeedge.llama import library
from moeedge.llama.model import Model
from tests.conftest import TinyFactory
from tests.support.cases import MOE_CASES
from tests.support.hybrid import MANY_EXPERTS, hybrid_config
from tests.support.stock import StockContext

PROMPT = np.random.default_rng(4).integers(0, 256, 10).tolist() * 2  # copies: n-gram lookup has something to find


@dataclass
class Loaded:
    """One case's models, loaded once, and stock's answer to PROMPT."""

    path: Path
    draft_path: Path
    model: Model
    draft: Model
    stock: StockContext
    expected: list[int]


def each_case(
    names: Iterable[str],
    name: str = "",
    values: Iterable[object] = (),
    *,
    quick: Collection[object] = (),
    slow: Collection[str] = (),
) -> pytest.MarkDecorator:
    """Runs a test for those of MOE_CASES, whose models stay loaded from one test of a module to the next.

    name, values: another parameter. The first case runs with all of its values, the others with those in `quick`; the
    other pairs are slow, and so are all of the cases in `slow`.
    """
    first, *others = names
    if not name:
        return pytest.mark.parametrize("loaded", [first, *others], indirect=True, scope="module")
    pairs = [
        pytest.param(
            case,
            value,
            id=f"{value}-{case}",
            marks=() if case == first or (value in quick and case not in slow) else pytest.mark.slow,
        )
        for case in (first, *others)
        for value in values
    ]
    return pytest.mark.parametrize(("loaded", name), pairs, indirect=["loaded"], scope="module")


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, tiny: TinyFactory, tiny_draft: Path) -> Iterator[Loaded]:
    """Of the case that `each_case` names; the answer has the module's N_PREDICT tokens."""
    library.start()
    arch, dimensions = MOE_CASES[request.param]
    path = tiny(arch, **(dimensions | {"experts": MANY_EXPERTS}))
    with ExitStack() as stack:
        stock = stack.enter_context(StockContext(path, n_ctx=512))
        expected, _ = stock.greedy(PROMPT, request.module.N_PREDICT)
        config = hybrid_config(path, tiny_draft, 0.5)
        model = stack.enter_context(Model.load(path, device=config.device))
        draft = stack.enter_context(Model.load(tiny_draft, device=config.device))
        yield Loaded(path, tiny_draft, model, draft, stock, expected)
