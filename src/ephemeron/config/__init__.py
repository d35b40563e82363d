"""Typed edge, folders of this machine, and the user's code: what every layer needs and no product owns."""
