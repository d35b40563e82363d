"""The code that functions run. It imports neither planner nor command line: cold starts are billed."""
