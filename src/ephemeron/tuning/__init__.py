"""Search for good parameters and configurations of jobs."""
