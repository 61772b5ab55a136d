"""Load batches over a mesh: samples along its data axis, blocks of each sample along its domain axes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from ..comm import collectives
from ..comm.consensus import check_arguments
from ..errors import ShardingError
from ..layout import Layout, balanced, starts
from ..tensor import wrap
from .error_sync import can_exchange_on_host, run_with_error_sync
from .prefetch import prefetch_map
from .sharding import SampleSharding, ZippedDatasets


class ShardedLoader:
    """Iterate over batches of a dataset as ShardTensors; each rank reads only its local shard.

    Ranks that differ on the mesh axis `data` get different samples, `batch_size` each; ranks that differ on the
    `domain` axes (default: all others) get blocks of the same samples. A batch has the structure of a sample (tensor,
    tuple or dict). Each of its tensors has a batch dim in front and is on the submesh of the domain axes. On a mesh
    with the data axis alone, tensors are plain.

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "spatial"))
        loader = ShardedLoader(Darcy(1000), 8, mesh)
        for batch in loader:
            loss = criterion(model(batch["x"]), batch["y"])

    `placements` are those of ONE sample, one per domain axis: a list for all its tensors, a mapping from key (or
    position) to list, or a function of (key, shape). By default one domain axis shards the second last dim, two shard
    the last two. `sizes` maps a domain axis to its shard sizes; the default is that of torch.chunk. A dataset with
    `read(i, slices)` and `shapes` is read in blocks; any other is indexed and sliced. With `shapes_of(i)` in place of
    `shapes`, samples differ in size, and the samples of one batch must not (`batch_size` is 1). A dict of fields is one
    dataset: `{"x": open_field(...), "y": open_field(...)}`.

    The order is a permutation that depends on `seed` and the epoch, the same on all ranks. Samples are never padded or
    repeated: without `drop_last`, the last samples are divided as evenly as possible, and a rank may get an empty
    batch; all ranks get the same number of batches. A mean over data ranks is then exact if each rank multiplies its
    local mean by `loader.weight` (its share of the batch's samples times the number of data ranks; 0 for an empty
    batch, whose loss must be a sum: the mean of an empty tensor is NaN).

    A thread reads `prefetch` batches ahead; it never communicates. `loader.waited` is the time in seconds that the
    consumer was blocked by it. If reading fails on one rank, all raise.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        mesh: DeviceMesh,
        *,
        data: str | None = "data",
        domain: str | Sequence[str] | None = None,
        placements: Sequence[Placement] | Mapping[Any, Sequence[Placement]] | Callable[..., Any] | None = None,
        sizes: Mapping[str, Sequence[int]] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        prefetch: int = 2,
    ):
        dataset, samples = run_with_error_sync("ShardedLoader", mesh, lambda: _with_length(dataset))
        # Ranks with different orders would combine blocks of different samples.
        check_arguments(
            "ShardedLoader",
            mesh,
            dict(samples=samples, batch_size=batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last),
            always=True,
        )
        names = mesh.mesh_dim_names or ()
        if data is not None and data not in names:
            raise ValueError(
                f"ShardedLoader: the mesh has axes {names} and no data axis {data!r}; pass data=None for no data axis"
            )
        if domain is None:
            domain = tuple(name for name in names if name != data)
        domain = (domain,) if isinstance(domain, str) else tuple(domain)
        if list(domain) != [name for name in names if name in domain and name != data]:
            raise ValueError(f"ShardedLoader: domain {domain} must be axes of {names} in mesh order, without {data!r}")
        if batch_size < 1 or prefetch < 0 or not 0 <= seed < 2**32:
            raise ValueError(
                f"ShardedLoader: batch_size {batch_size} must be at least 1, prefetch {prefetch} at least 0, and seed "
                f"{seed} must have 32 bits"
            )
        if not len(dataset):
            raise ValueError("ShardedLoader: the dataset is empty")
        self.dataset, self.batch_size, self.mesh = dataset, batch_size, mesh
        self.shuffle, self.seed, self.drop_last, self.prefetch = shuffle, seed, drop_last, prefetch
        self.data_size = mesh.size(names.index(data)) if data is not None else 1
        self.data_coord = mesh.get_local_rank(data) if data is not None else 0
        self.data_group = mesh.get_group(data) if data is not None else None
        self.domain = mesh[domain] if domain else None if names else mesh  # a mesh without names is all domain
        if drop_last and len(dataset) < self.global_batch:
            raise ValueError(
                f"ShardedLoader: {len(dataset)} samples do not fill one batch of {batch_size} on {self.data_size} data "
                f"ranks, and drop_last drops partial batches"
            )
        self._sharding = run_with_error_sync(
            "ShardedLoader", mesh, lambda: SampleSharding(dataset, self.domain, placements, sizes)
        )
        if self.domain is not None:
            # Ranks with other shapes would exchange messages of other sizes; with other keys, one of them fails alone.
            check_arguments("ShardedLoader", mesh, self._sharding.describe(), always=True)
        self._syncs_errors = can_exchange_on_host(mesh)
        self._dtypes: list[torch.dtype] | None = None  # of the first batch, the same on all ranks
        self.epoch, self._seen, self._resume = 0, 0, 0
        self.weight = 1.0  # of the last batch, like `indices`
        self.indices: list[int] = []
        self.waited = 0.0  # total seconds that the consumer was blocked on reading

    @property
    def global_batch(self) -> int:
        """Samples in a full batch over all data ranks."""
        return self.batch_size * self.data_size

    def __len__(self) -> int:
        """Batches in a full epoch, the same on every rank."""
        full, rest = divmod(len(self.dataset), self.global_batch)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this epoch; after `load_state_dict`, those after the saved position."""
        self._seen, self._resume = self._resume, 0
        order = np.arange(len(self.dataset))
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        for taken, batch in self._batches(order.tolist(), self._seen, self.drop_last):
            self._seen += taken
            yield batch
        self.epoch, self._seen = self.epoch + 1, 0

    def sweep(self) -> Iterator[Any]:
        """Yield every sample once, in the order of the dataset, none dropped; the loader's position does not change."""
        for _, batch in self._batches(list(range(len(self.dataset))), 0, False):
            yield batch

    # ------------------------------------------------------------------ position

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Epochs advance by themselves; setting the current one has no effect."""
        if epoch != self.epoch:
            self.epoch, self._seen, self._resume = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch, valid for any batch size and number of data ranks."""
        epoch, seen = self._position(self.epoch, self._seen or self._resume)
        return {"epoch": epoch, "seen": seen, "seed": self.seed, "shuffle": int(self.shuffle), "n": len(self.dataset)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved position: the next iteration yields the rest of that epoch, in the same order."""
        mine = self.state_dict()
        if differ := [key for key in ("n", "seed", "shuffle") if int(state[key]) != mine[key]]:
            details = ", ".join(f"{key} {int(state[key])} (here {mine[key]})" for key in differ)
            raise ValueError(f"ShardedLoader: the saved position is of another order of samples: {details}")
        self.epoch, self._resume = self._position(int(state["epoch"]), int(state["seen"]))
        self._seen = 0

    def _position(self, epoch: int, seen: int) -> tuple[int, int]:
        left = len(self.dataset) - seen
        over = left < (self.global_batch if self.drop_last else 1)
        return (epoch + 1, 0) if over else (epoch, seen)

    # ------------------------------------------------------------------ batches

    def _batches(self, order: list[int], seen: int, drop_last: bool) -> Iterator[tuple[int, Any]]:
        """Yield the number of samples over all ranks and this rank's batch of them."""
        shares = []
        for at in range(seen, len(order), self.global_batch):
            count = min(self.global_batch, len(order) - at)
            if count == self.global_batch or not drop_last:
                counts = balanced(count, self.data_size)
                begin = at + starts(counts)[self.data_coord]
                shares.append((count, order[begin : begin + counts[self.data_coord]]))
        with closing(prefetch_map(lambda share: self._read_batch(share[1]), shares, self.prefetch)) as blocks:
            for count, indices in shares:
                # If a message would have to wait for the accelerator's queue, a rank that fails raises alone.
                mesh = self.mesh if self._syncs_errors else None
                read = run_with_error_sync("ShardedLoader", mesh, lambda: self._next_block(blocks))
                if self._dtypes is None:
                    self._compare_dtypes([t.dtype for t, _ in read])
                self.weight, self.indices = len(indices) * self.data_size / count, indices
                yield (
                    count,
                    self._sharding.restore_structure([self._to_device(t, layout, len(indices)) for t, layout in read]),
                )

    def _next_block(self, blocks: Iterator[Any]) -> Any:
        begun = time.perf_counter()
        try:
            read = next(blocks)
        finally:
            self.waited += time.perf_counter() - begun
        dtypes = [t.dtype for t, _ in read]
        if self._dtypes is not None and dtypes != self._dtypes:
            raise ShardingError(f"a batch has tensors of {dtypes}, and the first one had {self._dtypes}")
        return read

    def _compare_dtypes(self, dtypes: list[torch.dtype]) -> None:
        """Raise on all ranks if their first batches differ in a dtype: a message would reinterpret the bits."""
        check_arguments("ShardedLoader", self.mesh, {"dtypes": dtypes}, always=True)
        self._dtypes = dtypes

    def _read_batch(self, indices: list[int]) -> list[tuple[Tensor, Layout | None]]:
        """Read this rank's blocks in the thread, to pinned memory for CUDA, so that copies overlap computation."""
        blocks = self._sharding.read(indices)
        return [(t.pin_memory(), layout) for t, layout in blocks] if self.mesh.device_type == "cuda" else blocks

    def _to_device(self, local: Tensor, layout: Layout | None, samples: int) -> Tensor:
        local = local.to(collectives.device_of(self.mesh), non_blocking=True)
        return local if layout is None else wrap(local, layout.insert(0, samples))


def _with_length(dataset: Any) -> tuple[Any, int]:
    """Return a dataset, several zipped ones as one, and its number of samples."""
    dataset = ZippedDatasets(dataset) if isinstance(dataset, Mapping) else dataset
    return dataset, len(dataset)
