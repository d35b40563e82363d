"""Dependencies of LAmbdaPACK programs from equations over their loops (NumPyWren, survey 2.4, algorithms 1 and 2)."""
