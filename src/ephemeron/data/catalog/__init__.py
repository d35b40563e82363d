"""Datasets that are described once and read the same way wherever they are stored (DPFlow, section 3.3.1).

    store     DatasetStore: the published datasets; publishing new versions
    dataset   Dataset, Variant: one version as a JSON document; DatasetShardMeta: metadata of samples, a thousand to a file
    meta      SampleMeta, DataRef: where the data of one sample is stored
    reader    DatasetReader: numbers in, decoded samples out (algorithm 3.1, UDR)
    importers from folders of images, COCO, LibriSpeech, CIFAR, MNIST, tables, … to metadata; data is not copied
    check     whether shards, files and ranges exist and can be decoded

Importing this imports neither obstore nor Pillow, pyarrow or soundfile.
"""

from ephemeron.data.catalog.dataset import LATEST, Dataset, DatasetShardMeta, Variant
from ephemeron.data.catalog.fetcher import ReadLimits
from ephemeron.data.catalog.meta import DataRef, SampleMeta
from ephemeron.data.catalog.reader import DatasetReader, Sample
from ephemeron.data.catalog.store import SHARD_SIZE, DatasetStore, NewVariant
from ephemeron.data.catalog.unpack import Audio

__all__ = [
    "LATEST",
    "SHARD_SIZE",
    "Audio",
    "DataRef",
    "Dataset",
    "DatasetReader",
    "DatasetShardMeta",
    "DatasetStore",
    "NewVariant",
    "ReadLimits",
    "Sample",
    "SampleMeta",
    "Variant",
]
