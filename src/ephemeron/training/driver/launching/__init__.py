"""From a job to a run that can be started: program, data, admission, trial, memory, initial weights."""
