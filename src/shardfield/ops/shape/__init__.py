"""Views, permutations, concatenation, splits, flips and rolls, diagonals."""
