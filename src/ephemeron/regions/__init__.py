"""Training across regions: which regions there are, how much each computes, and how they exchange parameters."""
