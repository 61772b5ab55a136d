"""The parts of torch's tensor protocol that are no ops: autograd entry points, hooks, metadata, TorchScript."""
