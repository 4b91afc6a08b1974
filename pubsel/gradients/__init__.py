"""Per-example gradients, as rows of a matrix that is written out or kept in factors, and their subspaces."""
