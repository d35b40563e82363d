"""Synchronisation as decisions without I/O."""

from ephemeron.sync.policy import UNBOUNDED, Policy, policy_for
from ephemeron.sync.retention import Retention

__all__ = ["UNBOUNDED", "Policy", "Retention", "policy_for"]
