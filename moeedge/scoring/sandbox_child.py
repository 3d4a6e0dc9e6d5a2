"""The sandbox's process: gives up its rights, runs the program, reports how it ended.

Started as `python -S -c <this text> CPU_S MEMORY_BYTES FILTER_HEX`, with a token of 32 bytes and the program on
standard input. A report on standard output is the token, one letter and a text:
  K  the program starts, under the kernel's filter
  N  the kernel takes no filter: nothing is run
  P  the program reached its end
  F  it did not; the text is the reason
Imports no module of moeedge, so that it starts within milliseconds.
"""

from __future__ import annotations

import os
import resource
import sys

_TOKEN_BYTES = 32
_REASON_CHARACTERS = 300
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_SIGKILL = 9


def _set_limits(cpu_s: int, memory_bytes: int) -> None:
    limits = {
        "RLIMIT_CPU": (cpu_s, cpu_s + 1),
        "RLIMIT_AS": (memory_bytes, memory_bytes),
        "RLIMIT_FSIZE": (0, 0),
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_NPROC": (0, 0),
        "RLIMIT_NOFILE": (64, 64),
    }
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, name), limit)


def _install_filter(instructions: bytes) -> bool:
    """Installs the filter; returns False if the kernel or the C library does not take it."""
    try:
        import ctypes

        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl.restype = ctypes.c_int
        word = ctypes.c_ulong
        prctl(_PR_SET_PDEATHSIG, word(_SIGKILL), word(0), word(0), word(0))
        if not instructions or prctl(_PR_SET_NO_NEW_PRIVS, word(1), word(0), word(0), word(0)) != 0:
            return False
        program = Program(len(instructions) // 8, instructions)
        return bool(prctl(_PR_SET_SECCOMP, word(_SECCOMP_MODE_FILTER), ctypes.byref(program), word(0), word(0)) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "it called sys.exit before its end"
    line = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<program>":
            line = trace.tb_lineno
        trace = trace.tb_next
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())[:_REASON_CHARACTERS]
    return f"{type(error).__name__}{': ' if text else ''}{text}{'' if line is None else f' (line {line})'}"


def main() -> None:
    """Runs the program and exits without Python's own shutdown, which the program could have changed."""
    cpu_s, memory_bytes, instructions = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
    with open(0, "rb", closefd=False) as stream:
        token, source = stream.read(_TOKEN_BYTES), stream.read()
    report_fd = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    sys.argv[:] = [""]
    sys.path[:] = [folder for folder in sys.path if folder]
    # kept here, because the program can replace the functions of the modules
    write, leave = os.write, os._exit
    module = type(sys)("__main__")
    sys.modules["__main__"] = module

    _set_limits(cpu_s, memory_bytes)
    is_filtered = _install_filter(instructions)
    write(report_fd, token + (b"K" if is_filtered else b"N"))
    if not is_filtered:
        leave(1)
    try:
        exec(compile(source, "<program>", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        write(report_fd, token + b"F" + _reason(error).encode("utf-8", "replace"))
        leave(1)
    write(report_fd, token + b"P")
    leave(0)


if __name__ == "__main__":
    main()
