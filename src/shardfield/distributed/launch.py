"""Read rank and world size of a process from the environment variables of its launcher.

Pure: from a mapping to a `Launch`, without side effects. The order of detection is torchrun (or anything else that sets
torch's variables), SLURM, Open MPI; a process without a launcher is a world of one.
"""

import re
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..errors import WorldError

# The second name is that of PhysicsNeMo, so that its scripts and job files work.
METHOD_VARIABLES = ("SHARDFIELD_DISTRIBUTED_INITIALIZATION_METHOD", "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD")
TIMEOUT_VARIABLE = "SHARDFIELD_TIMEOUT"
DEFAULT_PORT = 12355

Env = Mapping[str, str]


@dataclass(frozen=True)
class Launch:
    """One process of `world_size`, and the address of the rendezvous: rank 0 listens at `addr:port`.

    `local_rank` is None if the launcher does not set it. `job` is the same on all processes of a launch and differs
    between launches if the launcher has an id for them, so that two jobs at one port are detected.
    """

    method: str
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    addr: str = "localhost"
    port: int = DEFAULT_PORT
    job: str = ""
    store_prefix: str = ""  # see agent_store_prefix

    def __post_init__(self):
        if not 0 < self.port < 65536:
            raise WorldError(f"{self.method}: {self.port} is not a port")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise WorldError(f"{self.method}: rank {self.rank} in a world of {self.world_size} processes")


def detect(env: Env) -> Launch:
    """Return the launch that `env` describes; raise if variables are missing."""
    name, forced = next(((n, env[n]) for n in METHOD_VARIABLES if env.get(n)), (None, None))
    if forced:
        if forced.upper() not in LAUNCHERS:
            raise WorldError(f"{name}={forced} is not a launch method; choose one of {', '.join(LAUNCHERS)}")
        return LAUNCHERS[forced.upper()](env)
    if "RANK" in env and "WORLD_SIZE" in env:
        return from_env(env)
    if "SLURM_PROCID" in env and _slurm_describes_this_process(env):
        return from_slurm(env)
    if "OMPI_COMM_WORLD_RANK" in env:
        return from_open_mpi(env)
    if "RANK" in env or "WORLD_SIZE" in env:
        return from_env(env)  # raises: some variables are missing
    return Launch("single")


def _slurm_describes_this_process(env: Env) -> bool:
    """Return whether SLURM's variables are of this process, where Open MPI's may be set too.

    mpirun inside a SLURM job passes on the variables of the batch script, or of the daemons that it starts with srun;
    they differ from those that it sets itself.
    """
    if "OMPI_COMM_WORLD_RANK" not in env:
        return True
    size = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or env.get("SLURM_NPROCS")
    slurm = (env["SLURM_PROCID"], size, env.get("SLURM_LOCALID"))
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    return not _is_batch_script(env) and slurm == tuple(env.get(n) for n in names)


def from_env(env: Env) -> Launch:
    """Read torch's variables, set by torchrun or by the user."""
    world_size = _read_int(env, "WORLD_SIZE", default=None)
    needed = ["RANK", "WORLD_SIZE"] + (["MASTER_ADDR", "MASTER_PORT"] if world_size != 1 else [])
    missing = [n for n in needed if not env.get(n)]
    if missing:
        given = ", ".join(f"{n}={env[n]}" for n in needed if env.get(n)) or "none of its variables"
        raise WorldError(
            f"env launch: {given} set, but not {', '.join(missing)}. Start the program with torchrun, which sets "
            f"them all, or set all of {', '.join(needed)}; unset them to run a single process"
        )
    rank = _read_int(env, "RANK")
    local_rank = _read_int(env, "LOCAL_RANK", default=None)
    if local_rank is None and env.get("LOCAL_WORLD_SIZE"):
        local_rank = rank % _read_int(env, "LOCAL_WORLD_SIZE")
    here = _with_master_address(Launch("env", rank, _read_int(env, "WORLD_SIZE"), local_rank), env)
    return replace(here, job=env.get("TORCHELASTIC_RUN_ID", ""), store_prefix=agent_store_prefix(here.port, env))


def from_slurm(env: Env, port: int | None = None) -> Launch:
    """Read the variables of a task that srun started, or of the process of a batch script."""
    rank = _read_int(env, "SLURM_PROCID")
    sizes = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    world_size = _read_int(env, next((n for n in sizes if env.get(n)), "SLURM_NTASKS"))
    if world_size > 1 and _is_batch_script(env):
        # A rendezvous would never complete: sbatch reserves the tasks, but starts only the script.
        warnings.warn(
            f"sbatch reserved {world_size} tasks and started one process; `srun python ...` starts them all",
            RuntimeWarning,
            stacklevel=2,
        )
        rank, world_size = 0, 1
    job = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    here = Launch("slurm", rank, world_size, _read_int(env, "SLURM_LOCALID"), _slurm_addr(env), _port_for_job(job), job)
    return _with_master_address(here, env, port=port)


def _is_batch_script(env: Env) -> bool:
    return "SLURM_STEP_ID" not in env and env.get("ENVIRONMENT") == "BATCH"


def from_open_mpi(env: Env, addr: str | None = None, port: int | None = None) -> Launch:
    """Read the variables of a process that Open MPI's mpirun started."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    rank, world_size, local_rank = (_read_int(env, n) for n in names)
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    guess = "localhost"
    if _read_int(env, "OMPI_COMM_WORLD_LOCAL_SIZE", default=world_size) < world_size:
        hosts = expand_hosts(env.get("SLURM_JOB_NODELIST", ""))
        mpirun_host = re.search(r"tcp://([^,:;]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
        guess = hosts[0] if hosts else mpirun_host[1] if mpirun_host else ""
        if not (addr or env.get("MASTER_ADDR") or guess):
            raise WorldError(
                "openmpi launch: the ranks are on several hosts, and no variable names the host of rank 0. Set it: "
                "mpirun -x MASTER_ADDR=<host of rank 0> ..."
            )
    here = Launch("openmpi", rank, world_size, local_rank, guess, _port_for_job(job), job)
    return _with_master_address(here, env, addr, port)


LAUNCHERS: dict[str, Callable[[Env], Launch]] = {"ENV": from_env, "SLURM": from_slurm, "OPENMPI": from_open_mpi}


def agent_store_prefix(port: int, env: Env) -> str:
    """Return our key prefix in torchrun's store if it listens on `port`, else ""; each restart has its own prefix."""
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or env.get("MASTER_PORT") != str(port):
        return ""
    return f"shardfield/attempt {env.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def read_local_rank(env: Env) -> int | None:
    """Return the local rank of a process in an adopted world."""
    names = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
    return next((_read_int(env, n) for n in names if env.get(n)), None)


def read_timeout(env: Env) -> float | None:
    """Return the user's timeout in seconds, if one is set."""
    text = env.get(TIMEOUT_VARIABLE)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e8:
        raise WorldError(f"{TIMEOUT_VARIABLE}={text} is not a number of seconds above 0")
    return seconds


def expand_hosts(nodes: str) -> list[str]:
    """Expand a SLURM node list to its hosts, in order.

    >>> expand_hosts("gpu[08-10,3],login")
    ['gpu08', 'gpu09', 'gpu10', 'gpu3', 'login']
    """
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes):
        names = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", item):
            parts = [literal] if literal else [n for r in ranges.split(",") for n in _expand_range(r)]
            names = [name + part for name in names for part in parts]
        hosts += [name.strip() for name in names]
    return hosts


def _expand_range(text: str) -> list[str]:
    """Expand '08-10' to 08, 09, 10: leading zeros are part of the names."""
    first, _, last = text.partition("-")
    return [str(i).zfill(len(first)) for i in range(int(first), int(last or first) + 1)]


def _slurm_addr(env: Env) -> str:
    """Return the host of rank 0: the first node of the step.

    SLURM_LAUNCH_NODE_IPADDR is the host on which srun was called, often a login node, so it is the last choice.
    """
    if env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES"))) == "1":
        return "localhost"
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    hosts = next((h for n in lists if (h := expand_hosts(env.get(n, "")))), [])
    return hosts[0] if hosts else env.get("SLURM_LAUNCH_NODE_IPADDR") or "localhost"


def _with_master_address(launch: Launch, env: Env, addr: str | None = None, port: int | str | None = None) -> Launch:
    """Set the rendezvous address: that of the caller, else MASTER_ADDR and MASTER_PORT, else the launcher's."""
    master_port = _read_int(env, "MASTER_PORT", default=launch.port)
    return replace(
        launch,
        addr=addr or env.get("MASTER_ADDR") or launch.addr,
        port=int(port) if port else master_port,
    )


def _port_for_job(job: str) -> int:
    """Return a port that two jobs on one host are unlikely to share, below the ephemeral port range."""
    return 20000 + zlib.crc32(job.encode()) % 12000 if job.strip(".") else DEFAULT_PORT


def _read_int(env: Env, name: str, default=...):
    text = env.get(name)
    if not text:
        if default is ...:
            raise WorldError(f"{name} is not set: the program was not started by the selected launcher")
        return default
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{name}={text} is not an integer") from None
