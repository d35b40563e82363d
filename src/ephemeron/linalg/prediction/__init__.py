"""What a computation will take: tasks, operations, bytes, storage, time and price, from the programs and the shapes of tiles alone."""
