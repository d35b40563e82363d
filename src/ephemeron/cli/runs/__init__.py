"""The command `runs`: its verbs, the table of runs, and deletion."""
