"""`shardfield build`: compile the leaf functions in C++ for the torch and the Python that run."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path

import torch

from ..errors import ShardfieldError
from . import SOURCE, library_path, load

LIBRARIES = ("torch_python", "torch", "torch_cpu", "c10")


class BuildError(ShardfieldError):
    """The leaf functions cannot be compiled. Everything works without them."""


def command(words: list[str]) -> int:
    """Run `shardfield build` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="shardfield build",
        description="Compile the leaf functions in C++: a rank needs less time between messages. It needs a C++ "
        "compiler ($CXX, c++, g++ or clang++) and about half a minute.",
        allow_abbrev=False,
    )
    parser.add_argument("--if-possible", action="store_true", help="succeed without them where there is no compiler")
    options = parser.parse_args(words)
    begun = time.monotonic()
    try:
        path = library_path()
        if load() is not None:
            print(f"{path} is there")
            return 0
        compile_source(path)
        if load() is None:
            raise BuildError(f"{path} was compiled and cannot be loaded")
    except (BuildError, OSError, RuntimeError) as error:  # RuntimeError: no home folder
        if not options.if_possible:
            raise
        print(f"leaf functions stay in Python: {error}")
        return 0
    print(f"compiled {path} in {time.monotonic() - begun:.0f} s")
    return 0


def compile_source(path: Path) -> None:
    """Compile the source to `path`, which appears when it is complete: other processes may look for it or build it."""
    compiler = find_compiler()
    root = Path(torch.__file__).parent
    folders = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    abi = int(torch.compiled_with_cxx11_abi())
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = os.path.join(folder, path.name)
        words = [
            *compiler, "-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w",
            f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *(f"-I{folder}" for folder in folders), str(SOURCE), "-o", new,
            f"-L{root / 'lib'}", *(f"-l{name}" for name in LIBRARIES),
        ]  # fmt: skip
        try:
            done = subprocess.run(words, capture_output=True, text=True)
        except OSError as error:
            raise BuildError(f"{compiler[0]} does not start: {error}") from error
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            raise BuildError(f"{compiler[0]} fails: {(errors or [done.stderr.strip() or 'no message'])[0]}")
        os.replace(new, path)


def find_compiler() -> list[str]:
    """Return the C++ compiler: the words of the variable CXX, or the first that is installed."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("there is no C++ compiler: install g++, or name one by the variable CXX")
