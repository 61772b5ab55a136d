"""Settings of the whole test run."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tests.forks import ForkServer

# Ranks and tests share few cores: more than one thread per process slows all of them down.
torch.set_num_threads(1)

# The same examples on every run, and no deadline: a first call pays for imports and connections.
settings.register_profile("shardfield", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("shardfield")


def pytest_collection_modifyitems(items):
    """Run slow tests first, so that no worker ends with a long test while the others are idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def forks():
    """Start the process that forks programs, on ranks too, after it has imported torch once."""
    forks = ForkServer()
    yield forks
    forks.close()


@pytest.fixture(autouse=True)
def no_world_left():
    """Fail the test that leaves a process world behind: a later test in this process would run inside of it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test initialized torch.distributed in the test process and did not end it")
