"""The command `linalg`."""
