"""Read the Python stack of a process that does not answer.

Each rank registers faulthandler with a file of its own. On SIGUSR1 the C handler writes the Python stack of every
thread to it, even while the main thread blocks inside C++.
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
    str(Path(__file__).parents[1]) + os.sep,  # the line of the test that called shardfield is more useful
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
    """Return the contents of the file."""
    file.seek(0)
    return file.read()


def wait_for_dumps(files: list[TextIO], seconds: float) -> list[str]:
    """Return the contents of the files once all are non-empty and none is growing, or after `seconds`."""
    limit = time.monotonic() + seconds
    before, now = [""], [read_all(file) for file in files]
    while time.monotonic() < limit and not (all(now) and now == before):
        time.sleep(0.05)
        before, now = now, [read_all(file) for file in files]
    return now


def read_stack(text: str, thread: int) -> list[Frame]:
    """Return the last dump of a thread in faulthandler's output, outermost frame first, without frames of the pool."""
    frames: list[Frame] = []
    in_thread = False
    for line in text.splitlines():
        if head := _THREAD.match(line):
            in_thread = int(head[1], 16) == thread
            if in_thread:
                frames = []
        elif in_thread and (frame := _FRAME.match(line)):
            frames.append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    pool_start = next((i for i, frame in enumerate(frames) if frame.file == _WORKER), len(frames))
    return frames[:pool_start][::-1]


def describe(frames: list[Frame]) -> str:
    """Name the innermost call, and the line of user code that led to it."""
    if not frames:
        return "its stack could not be read"
    innermost = frames[-1]
    user = next((f for f in reversed(frames) if not f.file.startswith(_LIBRARIES)), None)
    user = user or next((f for f in reversed(frames) if not f.file.startswith(_TORCH)), innermost)
    location = f"{user.file}:{user.line} in {user.function}: {user.source}"
    return f"in {location}" if user is innermost else f"in {innermost.function}, called from {location}"


def format_stack(frames: list[Frame]) -> str:
    """Format frames like a Python traceback."""
    lines = ["Stack (most recent call last):"] if frames else []
    for frame in frames:
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        if frame.source:
            lines.append(f"    {frame.source}")
    return "\n".join(lines)
