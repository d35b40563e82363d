"""ephemeron."""
