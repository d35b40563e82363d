"""The command `partition`."""
