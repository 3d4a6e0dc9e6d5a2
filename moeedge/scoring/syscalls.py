"""The system calls that a program under test may make, as a filter for Linux's seccomp.

Allowed is computation: memory, reading files, the clock, its own signals. Every other call fails with EPERM, which the
program sees as PermissionError: sockets, new processes and threads, signals to others, files opened for writing.

Assembled here instead of by libseccomp, which pip cannot install (pyseccomp needs the system's library); the assembler
is twenty lines and needs no update, because system call numbers never change. bubblewrap needs a program of its own and
user namespaces, which containers and some distributions forbid, and does not filter calls by itself.
"""

from __future__ import annotations

import errno
import platform
import struct
import sys

# Linux: unistd_64.h (x86_64) and asm-generic/unistd.h (aarch64)
_X86_64 = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "readv": 19, "writev": 20, "access": 21, "select": 23, "sched_yield": 24, "mremap": 25,
    "madvise": 28, "dup": 32, "dup2": 33,
    "nanosleep": 35, "getitimer": 36, "setitimer": 38, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79,
    "readlink": 89, "gettimeofday": 96, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104,
    "geteuid": 107, "getegid": 108, "getppid": 110, "rt_sigpending": 127, "sigaltstack": 131, "arch_prctl": 158,
    "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217, "set_tid_address": 218,
    "restart_syscall": 219, "fadvise64": 221, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271,
    "set_robust_list": 273, "dup3": 292, "getcpu": 309, "getrandom": 318, "membarrier": 324, "statx": 332, "rseq": 334,
    "faccessat2": 439,
}  # fmt: skip
_AARCH64 = {
    "getcwd": 17, "dup": 23, "dup3": 24, "faccessat": 48, "close": 57, "getdents64": 61, "lseek": 62, "read": 63,
    "write": 64, "readv": 65, "writev": 66, "pread64": 67, "pselect6": 72, "ppoll": 73, "readlinkat": 78,
    "newfstatat": 79, "fstat": 80, "exit": 93, "exit_group": 94, "set_tid_address": 96, "futex": 98,
    "set_robust_list": 99, "nanosleep": 101, "getitimer": 102, "setitimer": 103, "clock_gettime": 113,
    "clock_getres": 114, "clock_nanosleep": 115, "sched_getaffinity": 123, "sched_yield": 124, "restart_syscall": 128,
    "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigpending": 136, "rt_sigreturn": 139,
    "times": 153, "uname": 160, "getrusage": 165, "getcpu": 168, "gettimeofday": 169, "getpid": 172, "getppid": 173,
    "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "gettid": 178, "sysinfo": 179, "brk": 214,
    "munmap": 215, "mremap": 216, "mmap": 222, "fadvise64": 223, "mprotect": 226, "madvise": 233, "getrandom": 278,
    "membarrier": 283, "statx": 291, "rseq": 293, "faccessat2": 439,
}  # fmt: skip
# (call number, index of the argument that must have none of these bits)
_WRITING = 0o3 | 0o100 | 0o1000  # O_WRONLY and O_RDWR, O_CREAT, O_TRUNC: equal on both
_OPEN_X86_64 = ((2, 1), (257, 2))  # open, openat
_OPEN_AARCH64 = ((56, 2),)
_ARGUMENT_LISTS = {"ioctl": (0x5401, 0x541B, 0x5450, 0x5451), "fcntl": (0, 1, 2, 3, 4, 1030)}
# TCGETS, FIONREAD, FIONCLEX, FIOCLEX; F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
_MACHINES = {
    "x86_64": (0xC000003E, _X86_64, _OPEN_X86_64, {"ioctl": 16, "fcntl": 72}),
    "aarch64": (0xC00000B7, _AARCH64, _OPEN_AARCH64, {"ioctl": 29, "fcntl": 25}),
}

# instructions of the classic packet filter, linux/bpf_common.h
_LOAD, _AND, _IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16  # bytes in struct seccomp_data; an argument has 8


def syscall_filter() -> bytes:
    """Returns the filter as an array of struct sock_filter for this machine; empty for an unsupported one."""
    machine = _MACHINES.get(platform.machine())
    if machine is None or sys.platform != "linux" or sys.byteorder != "little" or sys.maxsize < 2**32:
        return b""
    audit_machine, plain, openings, with_arguments = machine
    refuse = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)
    # kill calls of another instruction set (32-bit on x86_64), whose numbers differ
    code = [(_LOAD, 0, 0, _MACHINE_AT), (_IF_EQUAL, 1, 0, audit_machine), (_RETURN, 0, 0, _KILL_PROCESS)]
    code += [(_LOAD, 0, 0, _NUMBER_AT)]
    for number in plain.values():
        code += [(_IF_EQUAL, 0, 1, number), allow]
    for number, argument in openings:
        code += [(_IF_EQUAL, 0, 5, number), (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), (_AND, 0, 0, _WRITING)]
        code += [(_IF_EQUAL, 0, 1, 0), allow, refuse]
    for name, number in with_arguments.items():
        allowed = _ARGUMENT_LISTS[name]
        code += [(_IF_EQUAL, 0, 2 + 2 * len(allowed), number), (_LOAD, 0, 0, _ARGUMENTS_AT + 8)]
        for value in allowed:
            code += [(_IF_EQUAL, 0, 1, value), allow]
        code += [refuse]
    code += [refuse]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
