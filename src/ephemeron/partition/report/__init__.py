"""Pictures and the page of a partition."""
