"""Common parts of the emulators of clouds: a service in a thread, limited processes, faults."""
