"""Exchange of updates between regions: one communicator in each region, in rank 0 of its functions."""

from ephemeron.regions.communicator.base import Communicator, LinkEstimate, Member, NormQuarantine, PeerTraffic, QuarantinedUpdate, Update

__all__ = ["Communicator", "LinkEstimate", "Member", "NormQuarantine", "PeerTraffic", "QuarantinedUpdate", "Update"]
