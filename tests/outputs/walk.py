"""Views and functions of the program called with values made from their types.

`screens` has the views on rows of real runs at two widths, `views` and `functions` have views, functions and classes of
logic on values made from their types. There a result is compared where it is of equal arguments: what went, or takes
something else, is no difference.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import io
import itertools
import json
import pkgutil
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from typing import Any

import numpy as np
from rich.console import Console

from tests.outputs import rows
from tests.outputs.program import scratch
from tests.outputs.values import TEXTS, compact, digest, example, flat, hints, plain

WIDTHS = (80, 100)
VARIANTS = 4
_VIEWS = ("moeedge.ui", "moeedge.lab.views")
# what draws with Matplotlib, waits for a terminal, or reads and writes files
_NO_VIEWS = re.compile(
    r"plots|pictures|console|progress|interrupt|\.(live|prompt|repl|single|report|sessions|pictures)$|engine_changes"
)
_NOT_CALLED = re.compile(
    r"disk_bytes_read|content_sha|read_env|free_|this_machine|llama_conditions|session_cond|trace_curves|run_|measure|write_|save|draw|open_|set_|load|notifier|quantize|attach|detach|start_|run\b"
)
# rooms of logic, of which functions and classes are called
_LOGIC = re.compile(
    r"moeedge\.(analysis|lab\.(analysis|policies|sim|traces|widen)|policies|schemas|speculation|units|experts|errors|"
    r"lab\.experiments\.(sp_moe|speculation_fit|step_times|validation)|"
    r"bench\.(arms|batch_curve|best_stock|budget_choice|config|experiment|figures|in_turn|quality|parallel_figures|"
    r"records|samples|whole_layers)|data\.(datasets|prompts)|"
    r"engine\.(answer|budgets|drafts|fallback|generation|grammar|layer_choice|sampling|stop_texts|types)|hardware\.spec|"
    r"health\.report|hub\.catalog|llama\.(json_schema|reasoning|settings|model_memory)|"
    r"planning\.(session_plan|estimate|memory_map|headers)|"
    r"scheduler\.(cache_governor|calibration|config|governor|prediction|sizing|stats|stopping)|"
    r"scoring\.answers|trace\.(format|steps)|"
    r"ui\.(figures|tables)|ui\.chat\.(answer_figures|stream|thinking|settings|panel|commands)|"
    r"cli\.(common|spelling|foreign|bench|completion|declare))\b"
)

_LIMIT_S = 0.25  # of recorded calls


def screens() -> Iterator[tuple[str, Any]]:
    """Every view of which rows of real runs are recorded, at every width."""
    with scratch():
        for _, owner, function in _views(lambda name: is_view(name) or name.startswith("moeedge.lab.cli.")):
            key = f"{owner.__name__}.{function.__name__}"
            label = key.removeprefix("moeedge.ui.")
            for number, given in enumerate(rows.calls(key, function, owner)):
                for width in WIDTHS if _has_console(function) else WIDTHS[:1]:
                    yield f"{label} {number} {width}", _called(function, owner, [], given, width)


def views(recorded: set[str] | None) -> Iterator[tuple[str, Any]]:
    """Every view on values made from its types."""
    import_module("moeedge.cli.chat_options")  # its declarations make the settings that a chat completes
    with scratch():
        for label, owner, function in _views(is_view):
            yield label, _call(function, owner, range(VARIANTS), WIDTHS if _has_console(function) else WIDTHS[:1])


def functions(recorded: set[str] | None) -> Iterator[tuple[str, Any]]:
    """Functions and classes of logic; recorded: the cases to call, None: all that are fast and give equal results."""
    import_module("moeedge.cli.chat_options")
    with scratch():
        for owner in modules(lambda name: bool(_LOGIC.match(name))):
            room = owner.__name__.removeprefix("moeedge.")
            classes = [
                (name, kind)
                for name, kind in vars(owner).items()
                if inspect.isclass(kind) and kind.__module__ == owner.__name__ and not name.startswith("_")
            ]
            for name, entry in [*functions_of(owner), *classes]:
                case = f"{room}.{name}"
                if recorded is not None and case not in recorded:
                    continue
                made = _results(entry, owner, limited=recorded is None)
                if recorded is None and (not made or made != _results(entry, owner, limited=True)):
                    continue  # nothing to see, slow, or of the clock
                yield case, made


def _results(entry: Any, owner: Any, *, limited: bool) -> dict[str, Any]:
    """The results for every variant, by the variant and the hash of its arguments; none where they take too long."""
    if limited:
        signal.signal(signal.SIGALRM, _too_long)
        signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    try:
        variants = range(len(TEXTS) + 1)
        found = _use(entry, owner, variants) if inspect.isclass(entry) else _call(entry, owner, variants, WIDTHS[:1])
    except _TooLong:
        return {}
    finally:
        if limited:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return found if any("raised" not in flat(each) for each in found.values()) else {}


class _TooLong(BaseException):
    """A call takes longer than a recording waits."""


def _too_long(*_: object) -> None:
    raise _TooLong


def _views(wanted: Callable[[str], bool]) -> Iterator[tuple[str, Any, Any]]:
    for owner in modules(wanted):
        for name, function in functions_of(owner):
            yield owner.__name__.removeprefix("moeedge.ui.") + f".{name}", owner, function


def _has_console(function: Any) -> bool:
    return any("Console" in str(each.annotation) for each in inspect.signature(function).parameters.values())


def is_view(name: str) -> bool:
    """Whether a module has views."""
    return name.startswith(_VIEWS) and not _NO_VIEWS.search(name)


def modules(wanted: Any) -> Iterator[Any]:
    root = import_module("moeedge")
    for info in pkgutil.walk_packages(root.__path__, "moeedge."):
        if wanted(info.name) and importlib.util.find_spec(info.name) is not None:
            yield import_module(info.name)


def functions_of(owner: Any) -> list[tuple[str, Any]]:
    return [
        (name, entry)
        for name, entry in vars(owner).items()
        if inspect.isfunction(entry)
        and entry.__module__ == owner.__name__
        and not name.startswith("_")
        and not _NOT_CALLED.match(name)
    ]


def _arguments(function: Any, owner: Any, variant: int) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by the function's type hints, but for the console. Raises Unmade."""
    known = hints(function, owner)
    given, named = [], {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = known.get(name, Any)
        if name == "self" or kind is Console or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        try:
            value = np.random.default_rng(variant) if kind is np.random.Generator else example(kind, name, variant)
        except Exception:
            if parameter.default is parameter.empty:
                raise
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            given.append(value)
        else:
            named[name] = value
    return given, named


def _called(function: Any, owner: Any, given: list[Any], named: dict[str, Any], width: int) -> Any:
    """What a call returns and prints."""
    out = io.StringIO()
    for name, kind in hints(function, owner).items():
        if kind is Console:
            named = {
                name: Console(file=out, width=width, height=40, force_terminal=True, highlight=False, color_system=None)
            } | named
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            result = plain(function(*given, **named))
    except Exception as error:
        return {"raised": type(error).__name__}
    if isinstance(result, str) and "\n" in result:
        result = result.splitlines()
    printed = [plain(line.rstrip()) for line in out.getvalue().splitlines()]
    return result if not printed else printed if result is None else {"printed": printed, "returned": result}


def _of(variant: object, *given: Any) -> str:
    """The name of a result: the variant, and the hash of what it was made of."""
    return f"{variant} {digest(json.dumps(plain(given)))[:6]}"


def _call(function: Any, owner: Any, variants: Iterable[int], widths: tuple[int, ...]) -> dict[str, Any]:
    """The results of a function by variant and width; of one without arguments once."""
    found = {}
    for variant in variants if inspect.signature(function).parameters else (0,):
        for width in widths:
            with suppress(Exception):  # no arguments can be made
                given, named = _arguments(function, owner, variant)
                name = _of(f"{variant} {width}", given, named)
                found[name] = compact(_called(function, owner, given, named, width))
    return found


def _use(kind: Any, owner: Any, variants: Iterable[int]) -> dict[str, Any]:
    """What an object's properties and methods give, called one after the other, twice."""
    found: dict[str, Any] = {}
    for variant in variants:
        with suppress(Exception):
            if dataclasses.is_dataclass(kind):
                made = given = example(kind, "", variant)
            elif (
                issubclass(kind, (Exception, tuple)) or inspect.isabstract(kind) or getattr(kind, "_is_protocol", False)
            ):
                continue
            else:
                given = _arguments(kind.__init__, owner, variant)
                made = kind(*given[0], **given[1])
            whole = _of(variant, given)
            names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
            for turn, name in itertools.product(range(2), names):
                entry = inspect.getattr_static(kind, name)
                if name.startswith("_") or _NOT_CALLED.match(name):
                    continue
                with suppress(Exception):
                    if isinstance(entry, property) or type(entry).__name__ == "cached_property":
                        found[f"{whole} {turn} {name}"] = compact(plain(getattr(made, name)))
                    elif inspect.isfunction(entry):
                        is_ours = entry.__module__.startswith("moeedge")
                        from_module = import_module(entry.__module__) if is_ours else owner
                        own, named = _arguments(entry, from_module, variant + turn)
                        result = _called(entry, from_module, [made, *own], named, WIDTHS[0])
                        found[f"{whole} {_of(turn, own, named)} {name}"] = compact(result)
    return found
