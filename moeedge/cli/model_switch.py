"""The session of a chat, which /model replaces by one with another model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from moeedge.cli.engine_options import EngineOptions
from moeedge.cli.model_files import ModelFiles, resolve_models
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError, MoeedgeError
from moeedge.notifications import Notify
from moeedge.paths import user_path

if TYPE_CHECKING:
    from types import TracebackType

    from moeedge.engine.session import Session

_DRAFT_WORDS = ("auto", "mtp", "ngram", "none")


class ModelSwitch:
    """Opens a session, and another one in its place when it is called; closes the last at its end.

    configure: makes the configuration of a session with these files.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine: EngineOptions,
        configure: Callable[[EngineOptions, ModelFiles], EngineConfig],
        notify: Notify,
    ) -> None:
        self._config = config
        self._engine = engine
        self._configure = configure
        self._notify = notify
        self.session = self._open(config)

    def __enter__(self) -> ModelSwitch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.session.close()

    def __call__(self, name: str) -> Session:
        """A session with the model of that name or file; the old one is closed first, since both may not fit.

        Raises MoeedgeError before that where the model is not here; SwitchError where it cannot be opened.
        """
        if self._config.expert_budget is not None:
            raise InputError(
                "An expert budget belongs to the model that the chat began with.", "Start another chat with -m."
            )
        draft = self._engine.model_draft
        files = resolve_models(user_path(name), draft if draft in _DRAFT_WORDS else "auto")
        config = self._configure(self._engine, files)
        if not config.model.exists():
            raise InputError(f"There is no model {name} here.", "moeedge list shows the names, moeedge pull downloads.")
        return self._replace(config)

    def resize(self, n_ctx: int) -> Session:
        """A session with the same model and a context of so many tokens; the old one is closed first.

        Raises SwitchError where it cannot be opened.
        """
        return self._replace(replace(self._config, n_ctx=n_ctx))

    def _replace(self, config: EngineConfig) -> Session:
        from moeedge.ui.chat.interrupt import Ended
        from moeedge.ui.chat.repl import SwitchError

        self.session.close()
        try:
            self.session = self._open(config)
        except Ended:  # the program ends
            raise
        except (MoeedgeError, ValueError, KeyboardInterrupt) as error:
            self.session = self._open(self._config)
            stopped = isinstance(error, KeyboardInterrupt)
            message = error.message if isinstance(error, MoeedgeError) else "Stopped." if stopped else f"{error}."
            raise SwitchError(message, getattr(error, "hint", ""), self.session) from None
        self._config = config
        return self.session

    def _open(self, config: EngineConfig) -> Session:
        from moeedge.engine.layer_search import open_session

        return open_session(config, notify=self._notify)
