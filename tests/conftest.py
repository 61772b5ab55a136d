"""Settings of the whole test run."""

import pytest
import torch
from hypothesis import settings

from tests.forks import ForkServer

# Ranks and tests share few cores; more threads than one per process only get in each other's way.
torch.set_num_threads(1)

# The same examples on every run, and no deadline: a first call pays for imports and connections.
settings.register_profile("shardfield", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("shardfield")


def pytest_collection_modifyitems(items):
    """Slow tests go first: whoever is done before the others can then take some short ones, not wait for a long one."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def forks():
    """A process that runs programs, on ranks too, without paying for their imports."""
    forks = ForkServer()
    yield forks
    forks.close()
