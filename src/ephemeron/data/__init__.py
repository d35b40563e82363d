"""Samples: where they come from, how they travel, who owns which, and which one is next.

    sources   a job's `data` -> train and test samples (readers: idx, cifar, npz, datasets)
    samples   the two arrays, and their bytes
    split     unequal shares for unequal batch sizes (FasDL, section 4.2)
    feed      where a trainer's batches come from: these arrays, or a flow (flow, flowspec)
    sampling  which samples an iteration uses
    usercode  `module:name` in the user's folders
    bundling  those folders as a zip

Importing this imports neither torch nor scikit-learn: a cold start pays for every import.
"""

from ephemeron.data.bundling import Selection, bundle, unbundle
from ephemeron.data.samples import DataSets, Samples, decode, encode
from ephemeron.data.sampling import Sampler, batch_indices, epoch_order, global_batch
from ephemeron.data.sources import load
from ephemeron.data.split import Split, assign, plan_split
from ephemeron.data.usercode import resolve

__all__ = [
    "DataSets",
    "Sampler",
    "Samples",
    "Selection",
    "Split",
    "assign",
    "batch_indices",
    "bundle",
    "decode",
    "encode",
    "epoch_order",
    "global_batch",
    "load",
    "plan_split",
    "resolve",
    "unbundle",
]
