"""Algorithms as LAmbdaPACK programs. Sizes count tiles; matrices are tiled alike, with smaller tiles at the last row and column."""
