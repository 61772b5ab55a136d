"""Parts of torch's tensor protocol that are not ops: autograd entry points, hooks, metadata, TorchScript."""
