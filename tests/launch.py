"""Start programs as a user does, and return what they print."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Variables that launchers set for their processes. The tests may themselves run under a launcher.
LAUNCHER_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|SLURM_|OMPI_|PMI|SHARDFIELD_)"
)


def clean_env() -> dict[str, str]:
    """Return this environment without a launcher's variables, with this Python first and one thread per rank."""
    env = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    return env | {"OMP_NUM_THREADS": "1"}


def run(*command: str | Path, cwd: Path = ROOT, timeout: float = 120) -> str:
    """Run a command and return its stdout; its child processes are ended with it."""
    process = subprocess.Popen(
        [str(c) for c in command],
        cwd=cwd,
        env=clean_env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    line = " ".join(str(c) for c in command)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{line}: not done after {timeout} s\n{out}\n{err}") from None
    assert process.returncode == 0, f"{line}: exit {process.returncode}\n{out}\n{err}"
    return out


def torchrun(program: Path, nproc: int, logs: Path, *args: str, cwd: Path = ROOT, timeout: float = 120) -> list[str]:
    """Return what each rank prints under torchrun, from one file per rank: on a shared pipe their lines would mix."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    run(*launcher, "--log-dir", logs, "--redirects", "1", program, *args, cwd=cwd, timeout=timeout)
    return [next(logs.glob(f"*/attempt_0/{rank}/stdout.log")).read_text() for rank in range(nproc)]
