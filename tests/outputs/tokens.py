"""Tokens of answers: of drafts, devices, policies and samplers, on the bundled pair.

It is trained, so that its greedy tokens have clear gaps. That all ways of decoding give the tokens of the plain one is
tested in tests/lossless.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.outputs.program import scratch
from tests.outputs.values import plain

PROMPTS = ("What is 17 + 25?", "Tell me a story about a lighthouse.", "Sort: pear, apple, fig, plum")
N_PREDICT = 32
COUNTS = (
    *("prompt_tokens", "cached_tokens", "prefill_tokens", "generated_tokens", "steps", "drafted", "accepted"),
    *("budgeted_steps", "experts_max", "context_shifts", "dropped_tokens", "ngram_steps"),
)
EMULATED: dict[str, Any] = {"device": "emulated"}
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"seed": 1}
# name -> fields of the engine's configuration, of that of placement, and of those of sampling, one answer each
FAST: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
    "plain": (
        {"gamma": 0},
        {},
        [
            *(GREEDY, {"seed": 1}, {"seed": 2, "temperature": 1.5, "top_k": 5}, {"seed": 3, "top_p": 0.5}),
            *({"seed": 4, "min_p": 0.3}, {"seed": 5, "repeat_penalty": 1.3}, {"seed": 6, "presence_penalty": 0.9}),
            *({"seed": 7, "frequency_penalty": 0.5, "repeat_last_n": 8}, {"seed": 8, "typical_p": 0.5}),
            *({"seed": 9, "top_n_sigma": 1.0}, {"seed": 10, "xtc_probability": 0.5, "temperature": 1.2}),
            *({"seed": 11, "dry_multiplier": 0.8, "temperature": 1.2}, {"seed": 12, "dynatemp_range": 0.5}),
            *({"seed": 13, "samplers": ("top_k", "temperature"), "top_k": 3}, {"logit_bias": ((32, 4.0),), **GREEDY}),
            *({"ignore_eos": True, **GREEDY}, {"grammar": 'root ::= [a-c]+ "." [0-9]', **GREEDY}),
            *({"grammar": 'root ::= ("yes" | "no") " " [A-Z]+', "seed": 14}, {"stop": (" the", "2"), **GREEDY}),
        ],
    ),
    "draft": (
        {"draft": "bundled"},
        {},
        [GREEDY, {"seed": 1}, {"seed": 2, "temperature": 1.5}, {"seed": 3, "repeat_penalty": 1.3, "top_k": 8},
         {"seed": 4, "presence_penalty": 0.9}, {"grammar": "root ::= [a-z ]+", "seed": 5}, {"stop": ("a",), **GREEDY}],
    ),
    "draft 1": ({"draft": "bundled", "gamma": 1}, {}, [GREEDY, {"seed": 6}]),
    "draft until 0.8": ({"draft": "bundled", "gamma": 8, "draft_p_min": 0.8}, {}, [GREEDY, {"seed": 7}]),
    "ngram": ({"draft": "ngram", "gamma": 6}, {}, [GREEDY, {"seed": 8}]),
    "short context": ({"draft": "bundled", "n_ctx": 64, "context_shift": True}, {}, [{"ignore_eos": True, **GREEDY}]),
    "full context": ({"gamma": 0, "n_ctx": 48}, {}, [{"ignore_eos": True, **GREEDY}]),
    "small batches": ({"draft": "bundled", "n_batch": 8, "n_ubatch": 4}, {}, [GREEDY]),
    "emulated spac": (EMULATED | {"draft": "bundled"}, {"cache_ratio": 0.17}, [GREEDY, {"seed": 9}]),
    "emulated lru": (EMULATED | {"gamma": 0}, {"cache_ratio": 0.5, "policy": "lru"}, [GREEDY]),
    "ram lfu": ({"draft": "bundled", "ram": 1 << 19}, {"policy": "lfu"}, [GREEDY, {"seed": 10}]),
    "budget 16": ({"draft": "bundled", "budget": {"budget": 16}}, {}, [GREEDY]),
    "budget 8 truncated": ({"draft": "bundled", "budget": {"budget": 8, "coverage": "truncation"}}, {}, [GREEDY]),
    "fewer experts": ({"gamma": 0, "n_expert_used": 4}, {}, [GREEDY]),
}  # fmt: skip
_POLICIES = (
    *("spac", "spac-paper", "spac-program", "lru", "lfu", "static", "moe-infinity", "fate", "adapmoe", "hybrimoe"),
    *("fiddler", "sp-moe-prefetch", "none"),
)
SLOW = {
    **{f"emulated {name}": (EMULATED | {"draft": "bundled"}, {"cache_ratio": 0.17, "policy": name}, [GREEDY, SEEDED])
       for name in _POLICIES},
    **{f"plain on {name}": (EMULATED | {"gamma": 0}, {"cache_ratio": 0.3, "policy": name}, [GREEDY])
       for name in _POLICIES},
    **{f"ram {size} {name}": ({"draft": draft, "ram": size}, {"policy": name}, [GREEDY])
       for size in (1 << 18, 1 << 20) for name, draft in (("lfu", "bundled"), ("lru", "ngram"), ("spac", "bundled"))},
    **{f"draft {gamma}": ({"draft": "bundled", "gamma": gamma}, {}, [GREEDY, {"seed": gamma}]) for gamma in (2, 8, 16)},
    **{f"budget {n} {rank}": ({"draft": "bundled", "budget": {"budget": n, "ranking": rank}}, {}, [GREEDY])
       for n in (12, 24) for rank in ("picks", "router")},
}  # fmt: skip


def fast() -> Iterator[tuple[str, Any]]:
    """The cases of the default suite."""
    yield from _bundled(FAST)
    yield "talk", _talk()


def slow() -> Iterator[tuple[str, Any]]:
    """The others."""
    yield from _bundled(SLOW)


LINES = (
    *("/help", "/info", "/set", "/set temp 0", "/set top_k 5", "/set nothing 1", "/set seed x", "What is 17 + 25?"),
    *("/stats", "/regen", "/undo", "/undo", "/system You are brief.", "/system", "Sort: pear, fig", "/save a.json"),
    *("/clear", "/load a.json", "/load missing.json", "/nothing", "/set n_predict 3", "Tell me a story.", "/think off"),
    *("/model", "/model missing", "/set gamma 2", "Who are you?", "/stats", "/save", "/read text.txt", "/read no.txt"),
    *("/set think off", "/set stats full", "And you?", "/set budget 16", "/set ctx 256", "/set context_shift on"),
    *("/set markdown off", "/set grammar list.gbnf", "/set samplers top_k,temperature", "/set temp -1", "/sessions"),
    *("/resume", "/resume drop", "/info system", "/info parameters", "/set temp", "/?", "/helpp", "/exit", "/help"),
)
_FIGURES = re.compile(r"\d+(?:[.,]\d+)? (?:ms|s|t/s|min|%|[KMG]iB)(?![a-z])|\d+\.\d+|[▁-█⠀-⣿]+")


def _talk() -> Any:
    """A chat of a scripted user; measured figures are left out."""
    from rich.console import Console

    import_module("moeedge.cli.chat_options")  # its declarations make the settings
    types, talk = import_module("moeedge.engine.types"), import_module("moeedge.engine.conversation")
    out, err, left = io.StringIO(), io.StringIO(), iter(LINES)
    settings = import_module("moeedge.ui.chat.settings").Settings(types.SamplingConfig(**GREEDY), n_predict=16, gamma=3)

    def read(begun: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        print(f"> {begun}{line}", file=err)
        return line

    engine = {"draft": "bundled", "gamma": 3}
    with scratch() as folder, _open(import_module("moeedge.paths").bundled_target(), engine, {}) as session:
        (folder / "text.txt").write_text("One.\nTwo.\n")
        (folder / "list.gbnf").write_text('root ::= "a" | "b"')
        consoles = {"out": Console(file=out, width=100), "err": Console(file=err, width=200)}
        repl, switch = import_module("moeedge.ui.chat.repl").Repl, import_module("moeedge.ui.chat.session").ModelSwitch
        run = import_module("moeedge.run").Run()
        with switch(session.config, lambda name: replace(session.config, model=Path(name)), run) as models:
            talk = repl(models.session, talk.Conversation(), settings, read=read, switch=models, **consoles)
            code = talk.run()
    turns = [" ".join(_FIGURES.sub("#", plain(turn)).split()) for turn in err.getvalue().split("\n> ")]
    return [code, out.getvalue().splitlines(), turns]


def _bundled(cases: Any) -> Iterator[tuple[str, Any]]:
    with scratch() as folder:
        for name, (engine, placement, samplings) in cases.items():
            os.environ["MOEEDGE_CACHE"] = str(folder / name.replace(" ", "-"))  # no run warms another
            with _open(import_module("moeedge.paths").bundled_target(), engine, placement) as session:
                for number, sampling in enumerate(samplings):
                    yield f"{name} {number}", _answers(session, sampling)


def _open(model: Path, engine: dict[str, Any], placement: dict[str, Any]) -> Any:
    paths, types = import_module("moeedge.paths"), import_module("moeedge.engine.types")
    config = import_module("moeedge.scheduler.config").PlacementConfig(calibrate=False, **placement)
    given: dict[str, Any] = {"n_ctx": 512, "device": "none", "n_threads": 1} | engine
    if given.get("draft") == "bundled":
        given["draft"] = paths.bundled_draft()
    if "budget" in given:
        given["expert_budget"] = import_module("moeedge.policies.expert_budget").ExpertBudget(**given.pop("budget"))
    session = import_module("moeedge.engine.session").Session
    return session.open(types.EngineConfig(model=model, placement=config, **given))


def _answers(session: Any, sampling: dict[str, Any]) -> Any:
    """Tokens, counts and reasons of one conversation per prompt, and of a second turn after the last.

    Random answers are short and of a prompt that has many: another processor's rounding must not reach a draw.
    """
    is_greedy = sampling.get("temperature") == 0.0
    sampling = sampling if is_greedy else {"temperature": 1.4, "min_p": 0.0} | sampling
    drawn = import_module("moeedge.engine.types").SamplingConfig(**sampling)
    talk = import_module("moeedge.engine.conversation")
    found: list[Any] = []
    for prompt in PROMPTS if sampling == GREEDY else PROMPTS[1:2]:
        session.reset()
        conversation = talk.Conversation(system="")
        conversation.ask(prompt)
        tokens = talk.prompt_tokens(session.model, conversation, raw=False, template=session.template)
        for _ in range(2 if prompt == PROMPTS[-1] else 1):
            answer = session.generate(
                tokens, n_predict=N_PREDICT if is_greedy else 12, sampling=drawn, ignore_eos=drawn.ignore_eos
            )
            text = "".join(str(piece) for piece in answer.pieces())
            counts = [plain(getattr(answer.stats, name)) for name in COUNTS]
            found.append([" ".join(map(str, answer.tokens)), answer.stop_reason, counts, plain(text)])
            tokens = [*tokens, *answer.tokens, *session.model.tokenize(" Go on.")]
    return found
