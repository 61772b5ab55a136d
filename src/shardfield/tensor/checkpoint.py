"""The methods by which torch.distributed.checkpoint saves and loads a ShardTensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..layout import Layout


class Checkpointed:
    """Methods that torch.distributed.checkpoint calls. They import `dcp` late, which takes long to import."""

    _layout: Layout
    _local_tensor: Tensor
    _check_writable: Any

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """Return the chunks that this rank writes. Communicates if the tensor is deferred."""
        from .. import dcp

        return dcp.write_items(fqn, self._local_tensor, self._layout)

    def __create_chunk_list__(self) -> list[Any]:
        """Return the chunks to load into this tensor."""
        from .. import dcp

        self._check_writable()
        return dcp.chunk_list(self._layout)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the chunk at `index.offset`, a view of the local tensor."""
        from .. import dcp

        return dcp.chunk_at(index.offset, self._local_tensor, self._layout)
