"""The operator graph and the devices it is placed on, as values."""
