"""run_on_ranks returns every rank's result or reports what happened on every rank, and never hangs."""

import ctypes
import doctest
import functools
import importlib.util
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardfield.testing
from shardfield.testing import RanksFailed, run_on_ranks
from shardfield.testing._failures import format_ranks
from tests.launch import clean_env

# Functions that run on the ranks.


def describe_rank(*args, **kwargs):
    return dist.get_rank(), dist.get_world_size(), args, kwargs


def sum_over_ranks(x):
    x = x + dist.get_rank()
    dist.all_reduce(x)
    return x


def launcher_variables():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {name: os.environ[name] for name in names}, dist.get_backend(), torch.get_num_threads()


def process_ids():
    return os.getpid()


def fail_on(ranks, then_wait=False):
    if dist.get_rank() in ranks:
        raise ValueError("a bad shard")
    if then_wait:
        dist.barrier()


def assert_in_two_places():
    if dist.get_rank() == 1:
        assert dist.get_rank() == 0
    assert dist.get_rank() == 1


class KeepsOtherArguments(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raise_unpicklable():
    raise KeepsOtherArguments("one", "two")


def reduce_twice_on(ranks):
    x = torch.ones(3)
    dist.all_reduce(x)
    if dist.get_rank() in ranks:
        dist.all_reduce(x)  # the line that the report must name


def sleep_on(ranks, seconds):
    if dist.get_rank() in ranks:
        time.sleep(seconds)


def exit_on(rank, code):
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def kill_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crash_on(rank):
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)
    dist.barrier()


def start_reduce_on(rank):
    if dist.get_rank() == rank:
        dist.all_reduce(torch.ones(3), async_op=True)


def leave_world():
    dist.destroy_process_group()


def leave_and_return():
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    return float(sum_over_ranks(torch.zeros(())))


def open_many_files():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    for _ in range(min(2000, limit // 2)):
        os.dup(0)


def twice(x):
    return x, x + 1


def return_lambda():
    return lambda: None


def variable(name):
    return os.environ.get(name)


def surroundings():
    return os.getcwd(), sys.path[0]


def disturb():
    os.environ["SHARDFIELD_LEFT_BEHIND"] = "1"
    os.chdir("/")
    sys.path.insert(0, "/nowhere")
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    warnings.simplefilter("error")
    return draw()


def draw():
    return torch.rand((), dtype=torch.float32, device="cpu").item(), np.random.rand(), random.random()


def torch_state():
    warnings.warn("not an error by default", UserWarning, stacklevel=1)
    return torch.get_default_dtype(), torch.ones(()).device.type, torch.is_grad_enabled(), torch.get_num_threads()


def warn_as(module, category):
    warnings.warn_explicit("old", category, "file.py", 1, module=module)


def call_again():
    return run_on_ranks(process_ids, 1)


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# Results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_in_rank_order(world_size):
    expected = [(rank, world_size, (1, "a"), {"key": 2.0}) for rank in range(world_size)]
    assert run_on_ranks(describe_rank, world_size, 1, "a", key=2.0) == expected


def test_ranks_form_a_world():
    assert [x.tolist() for x in run_on_ranks(sum_over_ranks, 3, torch.zeros(2))] == [[3.0, 3.0]] * 3
    for rank, (variables, backend, threads) in enumerate(run_on_ranks(launcher_variables, 3)):
        assert variables == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
        }
        assert (backend, threads) == ("gloo", 1)


def test_processes_are_kept_between_calls():
    first = run_on_ranks(process_ids, 2)
    run_on_ranks(process_ids, 3)
    assert run_on_ranks(process_ids, 2) == first
    assert len(set(first)) == 2 and os.getpid() not in first


def test_large_arguments_and_results_pass():
    x = torch.arange(2_000_000, dtype=torch.float64)
    for same, more in run_on_ranks(twice, 3, x):
        assert torch.equal(same, x) and torch.equal(more, x + 1)


def test_partials_and_library_functions_run():
    assert run_on_ranks(functools.partial(describe_rank, 5), 2)[1] == (1, 2, (5,), {})
    assert run_on_ranks(dist.get_rank, 2) == [0, 1]


def test_idle_ranks_use_no_time():
    before = run_on_ranks(cpu_seconds, 2)
    time.sleep(1.0)
    assert all(after - start < 0.1 for start, after in zip(before, run_on_ranks(cpu_seconds, 2), strict=True))


# Failures. Each ends the processes; the next call must start new ones.


def failure(fn, *args, world_size=3, within=6.0, **kwargs) -> RanksFailed:
    run_on_ranks(process_ids, world_size)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as info:
        run_on_ranks(fn, world_size, *args, **kwargs)
    assert time.monotonic() - start < within
    assert float(run_on_ranks(sum_over_ranks, world_size, torch.zeros(()))[0]) == sum(range(world_size))
    return info.value


def test_error_on_one_rank():
    error = failure(fail_on, [1])
    assert sorted(error.errors) == [1]
    assert "run_on_ranks(fail_on, 3) failed on rank 1\n  rank 1: ValueError: a bad shard" in str(error)
    found = error.errors[1]
    assert (found.kind, found.type_name, found.message) == ("raised", "ValueError", "a bad shard")
    assert isinstance(found.exception, ValueError) and found.exception.args == ("a bad shard",)
    assert 'raise ValueError("a bad shard")' in found.traceback and "_worker.py" not in found.traceback


def test_error_on_all_ranks_is_reported_once():
    error = failure(fail_on, [0, 1, 2])
    assert "  ranks 0-2: ValueError: a bad shard" in str(error)
    assert str(error).count("Traceback (most recent call last)") == 1
    assert sorted(error.errors) == [0, 1, 2]


def test_bare_asserts_in_two_places_are_two_errors():
    error = failure(assert_in_two_places)
    assert "  ranks 0, 2: AssertionError\n  rank 1: AssertionError\n" in str(error)
    assert str(error).count("Traceback (most recent call last)") == 2


def test_ranks_blocked_by_a_failed_one_are_named():
    error = failure(fail_on, [1], then_wait=True)
    assert "  rank 1: ValueError: a bad shard" in str(error)
    assert f"ranks 0, 2: still running after another rank failed, in barrier, called from {__file__}:" in str(error)
    assert {rank: results.kind for rank, results in error.errors.items()} == {0: "stuck", 1: "raised", 2: "stuck"}


def test_exception_that_does_not_pickle_keeps_its_text():
    found = failure(raise_unpicklable, world_size=2).errors[0]
    assert (found.type_name, found.message, found.exception) == ("KeepsOtherArguments", "one and two", None)


@pytest.mark.parametrize("ranks", [[0], [1, 2]])
def test_deadlock_names_ranks_and_call(ranks):
    error = failure(reduce_twice_on, ranks, timeout=1.0)
    assert sorted(error.errors) == ranks
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if text.endswith("# the line that the report must name"))
    expected = (
        f"  {format_ranks(ranks)}: not done after 1 s, in all_reduce, called from {__file__}:{line} in reduce_twice_on"
    )
    assert expected in str(error)


def test_slow_rank_is_named_without_any_collective():
    error = failure(sleep_on, [1], 60.0, timeout=0.5)
    assert sorted(error.errors) == [1]
    assert f"rank 1: not done after 0.5 s, in {__file__}:" in str(error) and "time.sleep(seconds)" in str(error)


@pytest.mark.parametrize(
    "fn, args, expected",
    [
        (exit_on, (1, 7), "rank 1: exited with code 7 before the call returned"),
        (exit_on, (0, 0), "rank 0: exited with code 0 before the call returned"),
        (kill_on, (2,), "rank 2: was killed by SIGKILL before the call returned"),
        (crash_on, (1,), "rank 1: was killed by SIGSEGV, in string_at, called from"),
    ],
)
def test_dead_rank_is_named(fn, args, expected):
    error = failure(fn, *args)
    assert expected in str(error).splitlines()[1]
    assert error.errors[args[0]].kind == "died"


def test_rank_that_dies_between_calls_is_replaced():
    pids = run_on_ranks(process_ids, 2)
    os.kill(pids[1], signal.SIGKILL)
    time.sleep(0.2)
    assert not set(run_on_ranks(process_ids, 2)) & set(pids)


def test_collective_that_only_one_rank_starts_is_found(monkeypatch):
    monkeypatch.setattr("shardfield.testing._pool.BARRIER_TIMEOUT_S", 1.0)
    error = failure(start_reduce_on, 0, world_size=2)
    assert "ranks 0-1: the function returned on all ranks, but a barrier after it does not complete" in str(error)


def test_result_that_does_not_pickle():
    error = failure(return_lambda, world_size=2)
    assert "ranks 0-1: TypeError: the return value, a function, cannot be sent to the caller" in str(error)


def test_failure_pickles():
    error = failure(fail_on, [1], world_size=2)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.errors[1].message == "a bad shard"


def test_ranks_are_named_in_runs():
    assert [format_ranks(r) for r in ([3], [0, 1], [0, 1, 2, 5], [4, 2])] == [
        "rank 3",
        "ranks 0-1",
        "ranks 0-2, 5",
        "ranks 2, 4",
    ]


# Functions and arguments that are refused


def test_lambdas_and_local_functions_are_refused():
    def local():
        return 0

    for fn in (local, lambda: 0, functools.partial(local)):
        with pytest.raises(TypeError, match="move it to module level"):
            run_on_ranks(fn, 2)
    with pytest.raises(TypeError, match="the function cannot be sent .* move it to module level"):
        run_on_ranks(functools.partial(describe_rank, local), 2)


def test_argument_that_does_not_pickle_is_named():
    with pytest.raises(TypeError, match=r"argument 1 cannot be sent"):
        run_on_ranks(describe_rank, 2, 0, lambda: 0)
    with pytest.raises(TypeError, match=r"argument key= cannot be sent"):
        run_on_ranks(describe_rank, 2, key=lambda: 0)


def test_world_of_no_ranks_is_refused():
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        run_on_ranks(process_ids, 0)


def test_call_on_a_rank_is_refused():
    assert "RuntimeError: run_on_ranks(process_ids, 1): called on a rank" in str(failure(call_again, world_size=2))


# State at the start of a call, independent of earlier calls


def test_environment_is_the_callers(monkeypatch):
    monkeypatch.setenv("SHARDFIELD_SEEN", "yes")
    monkeypatch.setenv("RANK", "17")
    assert run_on_ranks(variable, 2, "SHARDFIELD_SEEN") == ["yes", "yes"]
    assert run_on_ranks(variable, 2, "RANK") == ["0", "1"]
    assert run_on_ranks(variable, 2, "SHARDFIELD_SEEN", env={"SHARDFIELD_SEEN": "no"}) == ["no", "no"]
    assert run_on_ranks(variable, 2, "SHARDFIELD_SEEN", env={"SHARDFIELD_SEEN": None}) == [None, None]
    monkeypatch.delenv("SHARDFIELD_SEEN")
    assert run_on_ranks(variable, 2, "SHARDFIELD_SEEN") == [None, None]


def test_working_directory_and_path_are_the_callers(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    assert run_on_ranks(surroundings, 2) == [(str(tmp_path), str(tmp_path / "modules"))] * 2


def test_state_is_restored():
    pids = run_on_ranks(process_ids, 2)
    draws = run_on_ranks(disturb, 2)
    assert draws[0] == draws[1]
    assert run_on_ranks(draw, 2) == draws
    assert run_on_ranks(variable, 2, "SHARDFIELD_LEFT_BEHIND") == [None, None]
    assert run_on_ranks(surroundings, 2) == [(os.getcwd(), os.path.abspath(sys.path[0]))] * 2
    assert run_on_ranks(torch_state, 2) == [(torch.float32, "cpu", True, 1)] * 2
    assert run_on_ranks(process_ids, 2) == pids


@pytest.mark.parametrize("fn", [leave_world, leave_and_return, open_many_files])
def test_world_that_cannot_be_used_again_is_replaced(fn):
    pids = run_on_ranks(process_ids, 2)
    results = run_on_ranks(fn, 2)
    if fn is leave_and_return:  # through MASTER_PORT, as with a launcher
        assert results == [1.0, 1.0]
    assert not set(run_on_ranks(process_ids, 2)) & set(pids)
    assert float(run_on_ranks(sum_over_ranks, 2, torch.zeros(()))[0]) == 1.0


@pytest.mark.parametrize("category", [UserWarning, FutureWarning, DeprecationWarning])
def test_warnings_of_shardfield_are_errors(category):
    assert f"{category.__name__}: old" in str(failure(warn_as, "shardfield.ops", category, world_size=1))
    run_on_ranks(warn_as, 1, "shardfield_extras", category)
    run_on_ranks(warn_as, 1, "torch.nn", category)


# Modules of the functions


def run_python(program, code=None, **env) -> subprocess.CompletedProcess:
    how = {"env": clean_env() | env, "input": code, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, program], timeout=60, **how)


SCRIPT = """
import sys
import torch.distributed as dist
from shardfield.testing import run_on_ranks

class Answer:
    def __init__(self, *results): self.results = results

def answer(): return Answer(dist.get_rank(), "wave" in sys.modules)

{guard}
print([a.results for a in run_on_ranks(answer, 2) if type(a) is Answer])
"""


def test_functions_of_a_script_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard='if __name__ == "__main__":').replace("\nprint", " print"))
    done = run_python(script, SHARDFIELD_PRELOAD="no_such_module wave")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[(0, True), (1, True)]\n", "")


def test_script_without_main_guard_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard=""))
    done = run_python(script)
    assert done.returncode == 1
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr
    assert "ranks 0-1: exited with code 1 while starting" in done.stderr


def test_function_typed_into_a_session_is_refused():
    done = run_python("-", code=SCRIPT.format(guard=""))
    assert done.returncode == 1 and "put it into a module and import it from there" in done.stderr


def test_program_read_from_a_pipe_can_run_imported_functions():
    code = "import torch.distributed as d, shardfield.testing as t; print(t.run_on_ranks(d.get_rank, 2), __file__)"
    done = run_python("-", code=code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1] <stdin>\n", "")


def imported(file: Path, monkeypatch):
    """Import a file that is not on the path, as pytest may."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    return module


def test_module_that_is_not_on_the_path(tmp_path, monkeypatch):
    for number in (1, 2):  # one name for two files, as conftest.py in two directories
        file = tmp_path / str(number) / "held_elsewhere.py"
        file.parent.mkdir()
        file.write_text(f"def which(): return {number}")
        assert run_on_ranks(imported(file, monkeypatch).which, 2) == [number, number]


def test_docstring_examples_run(tmp_path, monkeypatch):
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for example in finder.find(run_on_ranks, "run_on_ranks", globs={}):
        runner.run(example)
    assert runner.summarize(verbose=False) == doctest.TestResults(0, 3)

    text = shardfield.testing.__doc__.split("module level of the test file:")[1]
    assert "def test_total" in text
    file = tmp_path / "test_example.py"
    file.write_text("\n".join(line.removeprefix("    ") for line in text.splitlines()))
    imported(file, monkeypatch).test_total()


# Shutdown


HANGING_CALLER = """
import os, time
from shardfield.testing import run_on_ranks

def wait():
    os.write(1, f"{os.getpid()}\\n".encode())  # in one piece, unlike print
    time.sleep(60)

if __name__ == "__main__":
    run_on_ranks(wait, 2)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_their_caller(tmp_path, sent):
    script = tmp_path / "script.py"
    script.write_text(HANGING_CALLER)
    # A background job of a shell ignores interrupts, and so do its children; these tests may be such a job.
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "env": clean_env()}
    how["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen([sys.executable, script], **how) as caller:
        pids = [int(caller.stdout.readline()) for _ in range(2)]
        caller.send_signal(sent)
        assert caller.wait(60) != 0
    limit = time.monotonic() + 30
    while running := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < limit, f"still running: {running}"
        time.sleep(0.05)
