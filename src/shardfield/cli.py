"""The command `shardfield`: it lists the commands and runs one, alone or under a launcher."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from . import native
from ._version import __version__
from .errors import ShardfieldError

USAGE = """usage: shardfield COMMAND [...]

  train [RECIPE] [--config FILE] [--key value ...]   train a model; --help shows every key
  predict RUN --steps 40 --out forecast.zarr         run a trained model forward in time; write and score the states
  compare RUN RUN [--modules] [--tolerance T]        show where two training runs begin to differ
  check RECIPE|MODULE:FACTORY --mesh 2,2 [--shape S] compare a sharded model with one device
  plan [RECIPE] --gpus 8,64,512 --memory 80GB        choose a mesh; estimate memory and time of a step
  profile RECIPE|MODULE:FACTORY [--steps 3]          trace some steps on every rank; say what ranks wait for
  bench [NAME ...] [--quick] [--out DIR]             measure against the alternatives; --list shows the names
  convert CHECKPOINT TARGET [--weights]              to and from safetensors and torch.distributed.checkpoint
  build                                              compile functions that a rank calls around messages, once
  doctor                                             check launcher, devices, versions and links; say what to mend
  info                                               print versions and devices

Under a launcher every rank runs the same command: torchrun --nproc-per-node 4 -m shardfield train --domain 2
"""

ERRORS = (ShardfieldError, OSError)


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code. Code 2 means invalid arguments, explained in one line."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": train,
        "predict": partial(_run_module, module="predict.cli", expected=(*ERRORS, ValueError), alone=False),
        "compare": partial(_run_module, module="train.compare", expected=(*ERRORS, ValueError), alone=True),
        "check": partial(_run_module, module="debug.parity", expected=(ShardfieldError,), alone=False),
        "plan": partial(_run_module, module="planning.cli", expected=(ShardfieldError,), alone=True),
        "profile": partial(_run_module, module="profiling.command", expected=ERRORS, alone=False),
        "bench": partial(_run_module, module="bench.command", expected=ERRORS, alone=False),
        "convert": partial(_run_module, module="train.convert", expected=ERRORS, alone=True),
        "build": partial(_run_module, module="native.build", expected=ERRORS, alone=True),
        "doctor": partial(_run_module, module="doctor.command", expected=ERRORS, alone=False),
        "info": info,
    }
    if words[:1] == ["--version"]:
        _print_rank0(f"shardfield {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        _print_rank0(USAGE)
        return 0 if words else 2
    if words[0] not in commands:
        from .train.config import suggest_name

        return _fail(f"unknown command {words[0]!r}{suggest_name(words[0], commands)}")
    return commands[words[0]](words[1:])


def train(words: list[str]) -> int:
    from .train.config import UsageError, expand_flags, from_file, suggest_name
    from .train.nonfinite import NonFinite
    from .train.preemption import Preempted
    from .train.recipes import DEFAULT_RECIPE, RECIPES

    name = words.pop(0) if words and not words[0].startswith("-") else DEFAULT_RECIPE
    if name not in RECIPES:
        return _fail(f"unknown recipe {name!r}{suggest_name(name, RECIPES)}")
    try:
        import tyro
    except ImportError as error:
        return _fail(f"training needs more packages ({error}): pip install 'shardfield[recipes]'")
    kind, recipe = RECIPES[name]
    try:
        default = kind()
        if "--config" in words:
            at = words.index("--config")
            if at + 1 == len(words):
                raise UsageError("--config needs a file")
            default = from_file(kind, Path(words[at + 1]))
            del words[at : at + 2]
        prog = f"shardfield train {name}"
        config = tyro.cli(kind, args=expand_flags(words), default=default, prog=prog, console_outputs=_rank() == 0)
        config.check()
        return _run(recipe, config) if config.virtual == 1 else _run_virtual(recipe, config)
    except SystemExit as end:  # tyro has printed an error or the help
        return int(end.code or 0)
    except Preempted as end:
        _print_rank0(str(end))
        return 0
    except NonFinite as error:
        return _fail(str(error), 1)
    except ShardfieldError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(str(error), every_rank=True)


def _run(recipe, config) -> int:
    from .distributed.session import process_world
    from .train.config import UsageError
    from .train.log import Log
    from .train.loggers import check_loggers
    from .train.loop import Trainer
    from .train.plots import plot_curves
    from .train.run_folder import check_writable

    begun = time.monotonic()
    with process_world() as manager:
        config.check_ranks()
        check_writable(config.out)
        mesh = config.mesh(manager.device.type)
        check_loggers(config.logger)
        log = Log(config.out, manager.rank == 0, config.log_every, config.logger, config.as_json())
        with closing(log):
            shape = f"{mesh.size(0)} x {' x '.join(map(str, config.domain))}"
            ranks = "1 rank" if mesh.size() == 1 else f"{mesh.size()} ranks"
            log.print_line(f"{ranks}, {shape} (data x domain), on {manager.device.type}")
            try:
                task = recipe(config, mesh, log)
            except ValueError as error:  # an error of the data or the model about an option
                raise UsageError(str(error)) from error
            trainer = Trainer(task, config, mesh, log)
            results = trainer.run()
            if config.picture:
                trainer.draw()
                if manager.rank == 0:
                    plot_curves(config.out)
                for name in ("prediction", "curve"):
                    log.image(name, config.out / f"{name}.png", trainer.step)
            summary = ", ".join(f"{n} {v:.4f}" for n, v in results.items())
            log.print_line(f"done in {time.monotonic() - begun:.0f} s: {summary}; see {config.out}")
            return 0


def _run_virtual(recipe, config) -> int:
    """Run the ranks of `--virtual` in this process, together with those of the other processes of a launcher."""
    from .distributed import DistributedManager
    from .distributed.launch import detect
    from .train.config import UsageError
    from .virtual import VirtualWorld

    group = None
    if detect(dict(os.environ)).world_size > 1:
        if torch.accelerator.is_available():
            raise UsageError("--virtual with a launcher: virtual ranks of several processes exchange CPU tensors only")
        DistributedManager.initialize()
        group = torch.distributed.group.WORLD
    try:
        with VirtualWorld(config.virtual, memory=config.virtual_memory, group=group) as world:
            return max(world.run(_run, recipe, config))
    finally:
        if group is not None:
            DistributedManager.cleanup()


def _run_module(words: list[str], module: str, expected: tuple[type[Exception], ...], alone: bool) -> int:
    """Run `command(words)` of a module. `expected` errors are one line; `alone`: rank 0 does it for all ranks."""
    if alone and _rank() != 0:
        return 0
    try:
        return import_module(f".{module}", __package__).command(words)
    except SystemExit as end:  # argparse or tyro has printed an error or the help
        return int(end.code or 0)
    except expected as error:
        return _fail(str(error))


def info(words: list[str]) -> int:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = f"{torch.accelerator.device_count()} x {accelerator.type}" if accelerator else "no accelerator"
    _print_rank0(
        f"shardfield {__version__}, torch {torch.__version__}, Python {platform.python_version()}\n"
        f"{os.cpu_count()} cores, {devices}\n"
        f"leaf functions {native.state()}"
    )
    return 0


def _rank() -> int:
    """Return this process's rank from the launcher's variables, before a process group exists."""
    from .distributed.launch import detect

    try:
        return detect(dict(os.environ)).rank
    except ShardfieldError:
        return 0


def _print_rank0(text: str) -> None:
    if _rank() == 0:
        print(text, flush=True)


def _fail(text: str, code: int = 2, every_rank: bool = False) -> int:
    """Print an error and return the exit code. every_rank: the error may be this rank's alone."""
    rank = _rank()
    if rank == 0 or every_rank:
        print(f"shardfield: {f'rank {rank}: ' if rank else ''}{text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
