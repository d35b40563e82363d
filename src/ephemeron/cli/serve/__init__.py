"""The command `serve`: services of this machine."""
