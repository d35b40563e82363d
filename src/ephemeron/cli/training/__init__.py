"""Training from the command line: measure, plan, train, tune."""
