"""Linear algebra on functions: LAmbdaPACK programs over tiled matrices (NumPyWren, survey 2.4)."""
