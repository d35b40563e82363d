"""Control functions of a run across regions: one plans its devices, one knows the addresses of its communicators."""
