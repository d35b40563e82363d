"""Pictures and HTML page of a partition."""
