"""Read the stack of a process that does not answer.

Each rank points faulthandler at a file of its own: on SIGUSR1 the C handler writes the Python stack of
every thread there, also while the main thread waits inside C++ with the interpreter lock released.
"""

import linecache
import os
import re
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple, TextIO

import torch

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?+) in (.*)$')
_WORKER = str(Path(__file__).with_name("_worker.py"))
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARIES = (
    _TORCH,
    str(Path(__file__).parents[1]) + os.sep,  # shardfield itself: the caller's own line says more
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
    sysconfig.get_path("platlib") + os.sep,
    "<",
)


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()


def read_all(file: TextIO) -> str:
    """What the file holds by now."""
    file.seek(0)
    return file.read()


def wait_for_dumps(files: list[TextIO], seconds: float) -> list[str]:
    """What the files hold once all have been written to and none still grows, or the time is up."""
    limit = time.monotonic() + seconds
    before, now = [""], [read_all(file) for file in files]
    while time.monotonic() < limit and not (all(now) and now == before):
        time.sleep(0.05)
        before, now = now, [read_all(file) for file in files]
    return now


def read_stack(text: str, thread: int) -> list[Frame]:
    """The last dump of the given thread in faulthandler's output, outermost frame first, without the pool's own."""
    frames: list[Frame] = []
    ours = False
    for line in text.splitlines():
        if head := _THREAD.match(line):
            ours = int(head[1], 16) == thread
            if ours:
                frames = []
        elif ours and (frame := _FRAME.match(line)):
            frames.append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    inner = next((i for i, frame in enumerate(frames) if frame.file == _WORKER), len(frames))
    return frames[:inner][::-1]


def describe(frames: list[Frame]) -> str:
    """Name the innermost call and the line of the caller's own code that led to it."""
    if not frames:
        return "its stack could not be read"
    inner = frames[-1]
    own = next((f for f in reversed(frames) if not f.file.startswith(_LIBRARIES)), None)
    own = own or next((f for f in reversed(frames) if not f.file.startswith(_TORCH)), inner)
    where = f"{own.file}:{own.line} in {own.function}: {own.source}"
    return f"in {where}" if own is inner else f"in {inner.function}, called from {where}"


def format_stack(frames: list[Frame]) -> str:
    """The frames as Python prints a traceback."""
    lines = ["Stack (most recent call last):"] if frames else []
    for frame in frames:
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        if frame.source:
            lines.append(f"    {frame.source}")
    return "\n".join(lines)
