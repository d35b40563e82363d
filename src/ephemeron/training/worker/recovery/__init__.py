"""How ranks survive: checkpoints, claims and leases, hand-overs, replacements, generations, states given by peers."""
