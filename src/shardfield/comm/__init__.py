"""Moving plain tensors between ranks: `wire` sends, `route` says what goes where, `moves` are differentiable."""
