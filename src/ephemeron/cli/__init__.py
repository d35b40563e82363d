"""The command line: parses flags, calls the API, shows events."""
