"""Read rank, world size and rendezvous from each launcher's environment. No process is started."""

import pytest

from shardfield.distributed.launch import Launch, detect, expand_hosts, from_open_mpi, from_slurm, read_timeout
from shardfield.errors import WorldError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "r7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
}
SBATCH = {
    "ENVIRONMENT": "BATCH",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "17",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1169424385",
}
FORCE = "SHARDFIELD_DISTRIBUTED_INITIALIZATION_METHOD"


def without(env, *names):
    return {k: v for k, v in env.items() if k not in names}


def test_torchrun():
    launch = detect(TORCHRUN)
    assert launch == Launch("env", 3, 4, 1, "node0", 29500, job="r7", store_prefix="shardfield/attempt 2")


def test_variables_by_hand():
    by_hand = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    assert detect(by_hand) == Launch("env", 3, 4, None, "node0", 29500)
    assert detect(by_hand | {"LOCAL_WORLD_SIZE": "2"}).local_rank == 1
    # A world of one rank needs no rendezvous address.
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}) == Launch("env", 0, 1, None)


def test_srun():
    launch = detect(SRUN)
    assert (launch.method, launch.rank, launch.world_size, launch.local_rank) == ("slurm", 5, 8, 1)
    # srun may have been typed on a login node: rank 0 is on the first node of the step.
    assert launch.addr == "gpu08"
    assert detect(without(SRUN, "SLURM_STEP_NODELIST")).addr == "gpu07"
    assert detect(without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")).addr == "10.0.0.99"
    assert detect(SRUN | {"SLURM_STEP_NUM_NODES": "1"}).addr == "localhost"


def test_user_sets_the_rendezvous_of_srun_and_mpirun():
    user = {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "4711"}
    for env in (SRUN, MPIRUN):
        assert (detect(env | user).addr, detect(env | user).port) == ("elsewhere", 4711)
    assert from_slurm(SRUN | user, port=99).port == 99
    launch = from_open_mpi(MPIRUN | user, addr="there", port=99)
    assert (launch.addr, launch.port) == ("there", 99)


def test_jobs_on_one_host_use_different_ports():
    ports = {
        detect(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(s)}).port for job in (17, 18) for s in (0, 1)
    }
    assert len(ports) == 4 and all(20000 <= p < 32000 for p in ports)
    assert detect(SRUN).port == detect(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).port
    assert detect(MPIRUN).port != detect(MPIRUN | {"PMIX_NAMESPACE": "1169424386"}).port


def test_a_batch_script_is_one_process():
    assert detect(SBATCH).world_size == 1
    with pytest.warns(RuntimeWarning, match="reserved 4 tasks"):
        launch = detect(SBATCH | {"SLURM_NTASKS": "4"})
    assert (launch.rank, launch.world_size, launch.addr) == (0, 1, "gpu07")


def test_tasks_without_a_launch_address():
    # As a batch script may pass them on: without SLURM_LAUNCH_NODE_IPADDR the node list is used.
    tasks = without(SRUN, "SLURM_LAUNCH_NODE_IPADDR", "SLURM_STEP_NODELIST", "SLURM_STEP_ID")
    assert (detect(tasks).rank, detect(tasks).world_size, detect(tasks).addr) == (5, 8, "gpu07")


def test_mpirun():
    launch = detect(MPIRUN)
    assert (launch.method, launch.rank, launch.world_size, launch.local_rank) == ("openmpi", 1, 2, 1)
    assert launch.addr == "localhost"


def test_mpirun_on_several_hosts():
    spread = MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4"}
    uri = {"OMPI_MCA_orte_hnp_uri": "1169424384.0;tcp://10.0.0.1,172.17.0.1:36113;tcp6://[fd00::2]:37525"}
    assert detect(spread | uri).addr == "10.0.0.1"
    assert detect(spread | uri | {"SLURM_JOB_NODELIST": "gpu[07-08]"}).addr == "gpu07"
    assert detect(spread | {"MASTER_ADDR": "node0"}).addr == "node0"
    with pytest.raises(WorldError, match="mpirun -x MASTER_ADDR"):
        detect(spread)


def test_precedence_of_launchers():
    assert detect(TORCHRUN | SRUN | MPIRUN).method == "env"
    assert detect(SRUN).method == "slurm"
    assert detect({}).method == "single" and detect({}) == Launch("single")
    # mpirun in a SLURM job: the job's variables are set but do not describe this process.
    assert detect(SBATCH | {"SLURM_NTASKS": "2"} | MPIRUN).rank == 1
    for rank in ("0", "1"):
        assert detect(SBATCH | {"SLURM_NTASKS": "2"} | MPIRUN | {"OMPI_COMM_WORLD_RANK": rank}).method == "openmpi"
    # Both describe this process: SLURM's come first.
    both = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert detect(SRUN | MPIRUN | both).method == "slurm"
    # A job script may export some of torch's variables for its own use.
    assert detect(SRUN | {"WORLD_SIZE": "8", "MASTER_PORT": "4711"}).method == "slurm"


@pytest.mark.parametrize("name", [FORCE, "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD"])
def test_forcing_a_launcher(name):
    everything = TORCHRUN | SRUN | MPIRUN
    for method in ("ENV", "SLURM", "OPENMPI"):
        assert detect(everything | {name: method}).method == method.lower()
    with pytest.raises(WorldError, match=f"{name}=PBS .*ENV, SLURM, OPENMPI"):
        detect(everything | {name: "PBS"})
    with pytest.raises(WorldError, match="SLURM_PROCID is not set"):
        detect(TORCHRUN | {name: "SLURM"})


@pytest.mark.parametrize(
    "env, message",
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 set, but not RANK, MASTER_ADDR, MASTER_PORT. Start .* torchrun"),
        ({"WORLD_SIZE": "1"}, "WORLD_SIZE=1 set, but not RANK"),
        ({"RANK": "0"}, "RANK=0 set, but not WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "but not MASTER_ADDR"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE=four is not an integer"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 in a world of 4"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "70000 is not a port"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        (without(SRUN, "SLURM_NTASKS"), "SLURM_NTASKS is not set"),
        (without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set"),
    ],
)
def test_incomplete_variables_are_rejected(env, message):
    with pytest.raises(WorldError, match=message):
        detect(env)


@pytest.mark.parametrize(
    "nodes, hosts",
    [
        ("", []),
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("gpu[08-10],login", ["gpu08", "gpu09", "gpu10", "login"]),
        ("r[1-2]n[01-02]-ib,x", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib", "x"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("a-b[3].site,c", ["a-b3.site", "c"]),
    ],
)
def test_node_lists(nodes, hosts):
    assert expand_hosts(nodes) == hosts


def test_timeout():
    assert read_timeout({}) is None and read_timeout({"SHARDFIELD_TIMEOUT": "2.5"}) == 2.5
    for text in ("soon", "0", "-3", "nan"):
        with pytest.raises(WorldError, match=f"SHARDFIELD_TIMEOUT={text} is not a number of seconds"):
            read_timeout({"SHARDFIELD_TIMEOUT": text})
