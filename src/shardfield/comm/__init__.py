"""Send plain tensors from rank to rank: transports, collectives and routes, with and without autograd."""
