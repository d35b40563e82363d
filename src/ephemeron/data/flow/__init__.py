"""Data flows, from a dataset through map steps to batches: declared once, read anywhere (DPFlow, section 3.3.2).

flow           Flow: the description, a value: dataset, steps, what may be cached
parts          data and target of a sample of any shape
sample_loader  one sample through the steps, with its own random numbers, timed, and with errors that name the step
stream         positions of an epoch for each rank and batch, also after resumption with another world size (pure)
view           FlowView: views of a flow that can be read; `random_split`
local          functions that run in the reading process
loader         the loader: batches in order, epochs and states as in torchdata's StatefulDataLoader
cursor         starting points of its iterations, also after resumption (pure)
epoch          one iteration: loaded ahead, delivered in order
samplers       its order, for frameworks that use samplers
fingerprint    identity of the flow that a state belongs to
fork_pool      loader processes of this machine, with fault tolerance
collate        from samples to a batch, in memory that loader and trainer share
pickle_socket  messages between loaders and trainer
counters       time by stage, and advice
from_job       the flow that a job names: found and pinned at the start, opened again in functions
prefetch       batches chosen by another component, loaded ahead in processes or a thread
batch_source   a function's share of a job's flow

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
