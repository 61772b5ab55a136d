"""Matrix products, einsum, linear algebra, pairwise distances, sparse products."""
