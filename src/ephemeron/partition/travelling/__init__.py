"""Stages on their way to other machines: what a function has to know of a model that it cannot hold. Needs torch.

part_of(split, device) → document, constants → joined(document, constants) → a `Split` with this device's stages in it
"""

from ephemeron.partition.travelling.parts import Part, joined, owners, part_of

__all__ = ["Part", "joined", "owners", "part_of"]
