"""The command line: parses options, calls the Python interface, shows events."""
