"""Declared once, read anywhere: a data flow from a dataset through map steps to batches (DPFlow, section 3.3.2).

flow      Flow: the description, a value: dataset, steps, what may be cached
parts     data and target of a sample of any shape
loading   one sample through the steps, with its own random numbers, timed, and with errors that say where
stream    which positions of an epoch go to which rank and batch, also when resumed with other ranks (pure)
read      FlowView: views of a flow that can be read; `random_split`
local     what is done in the process that reads
shuffled  the loader: batches in order, epochs and states as of torchdata's StatefulDataLoader
cursor    where its iterations begin, and where a resumed one goes on (pure)
epoch     one iteration: loaded ahead, delivered in order
samplers  its order, for frameworks that ask for it
fingerprint  what a state is of
pool      loader processes of this machine, which may die
collate   from samples to a batch, in memory that loader and trainer share
messages  what loaders and trainer say to each other
counters  where the time went, and what would help
named     the flow that a job names: found and pinned at the start, opened again in functions
ahead     batches that somebody else chooses, loaded ahead in processes or a thread
feed      a function's share of a job's flow

from ephemeron.data.flow import Flow, LocalReader

flow = Flow("example/digits", version=1).dataset("core/mnist", variant="train").map_data("scale", scale)
for images, labels in flow.prepare_read(LocalReader(workers=2)).to_shuffled(batch_size=128, seed=0):
    ...
"""

from ephemeron.data.flow.counters import FlowCounters
from ephemeron.data.flow.description import MapData, MapStep, MapTarget, SampleAdapter
from ephemeron.data.flow.flow import Flow
from ephemeron.data.flow.loader import FlowLoader
from ephemeron.data.flow.stream import BatchStream
from ephemeron.data.flow.view import FlowReader, FlowView, LocalReader, random_split

__all__ = [
    "BatchStream",
    "Flow",
    "FlowCounters",
    "FlowLoader",
    "FlowReader",
    "FlowView",
    "LocalReader",
    "MapData",
    "MapStep",
    "MapTarget",
    "SampleAdapter",
    "random_split",
]
