"""llama.cpp's log as Python log records, and what is kept of it for error messages."""

from __future__ import annotations

import logging

import pytest

from moeedge.llama import library
from moeedge.llama.library import _on_log

INFO, WARNING, ERROR, CONTINUED = 2, 3, 4, 5  # enum ggml_log_level


def test_fragments_become_lines(caplog: pytest.LogCaptureFixture) -> None:
    library.logger.addHandler(caplog.handler)  # tests/conftest.py takes it off
    library.logger.setLevel(logging.DEBUG)
    for level, text in ((INFO, b"loading "), (CONTINUED, b"."), (CONTINUED, b".\n\n"), (ERROR, b"bad 100%\nworse\n")):
        _on_log(level, text, None)
    kept = [(level, text) for _, level, text in caplog.record_tuples]
    assert kept == [(logging.INFO, "loading .."), (logging.ERROR, "bad 100%"), (logging.ERROR, "worse")]


def test_the_first_error_is_kept_for_error_messages() -> None:
    library.clear_errors()
    assert library.first_error("none") == "none"
    _on_log(INFO, b"all is well\n", None)
    _on_log(WARNING, b"load_tensors: tensor 'x' is missing\n", None)
    _on_log(ERROR, b"failed to load model\n", None)
    assert library.first_error() == "tensor 'x' is missing"
    _on_log(ERROR, b"llama_model_load: error loading model: no vocabulary\n", None)
    assert library.first_error() == "error loading model: no vocabulary"
    library.clear_errors()


def test_nothing_is_printed_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    _on_log(ERROR, b"failed\n", None)
    library.clear_errors()
    assert capfd.readouterr() == ("", "")
