"""LAmbdaPACK: programs over tiles of matrices, embedded in Python (NumPyWren, survey 2.4, figure 17)."""
