"""Execution of LAmbdaPACK programs on functions: each task of the program is a task of the queue."""
