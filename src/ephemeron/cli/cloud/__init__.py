"""The command `cloud`: platforms and what is deployed there."""
