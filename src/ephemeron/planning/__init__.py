"""Finding the cheapest configuration that meets the limits: the space, the searches, the plan."""
