"""Data flows: from a dataset through map steps to batches (DPFlow, section 3.3.2).

    description    FlowDescription: dataset, steps, what may be cached, as a value; data and target of a sample of any shape
    sample_loader  one sample through the steps: seeded, timed, with errors that name the place
    collate        from samples to a batch, in memory that loader and trainer share
    pickle_socket  messages between loader processes and trainer
    fork_pool      loader processes of this machine, which may die
    backend        the port of loaders: none, processes of this machine, or a service
    stream         the positions of an epoch by rank and batch, also when resumed with other ranks (pure)
    fingerprint    identity of the samples that a state belongs to
    sample_view    SampleView: samples of a flow by their place in a view; functions that run in the reading process
    epoch          one iteration: loaded ahead, delivered in order, timed by stage
    loader         FlowLoader: batches in order, epochs and states as in torchdata's StatefulDataLoader
    view           Flow: the description with `prepare_read`; FlowView: views that can be read; LocalReader; random_split
    benchmark      rates and waiting times of a flow
    determinism    detection of random stages
    from_job       the flow that a job names: found and pinned at the start, opened again in functions
    prefetch       batches chosen by the caller, loaded ahead in processes or a thread
    batch_source   a function's share of a job's flow

from ephemeron.data.flow import Flow, LocalReader

flow = Flow("example/digits", version=1).dataset("core/mnist", variant="train").map_data("scale", scale)
for images, labels in flow.prepare_read(LocalReader(workers=2)).to_shuffled(batch_size=128, seed=0):
    ...
"""

from ephemeron.data.flow.description import MapData, MapStep, MapTarget, SampleAdapter
from ephemeron.data.flow.epoch import FlowCounters
from ephemeron.data.flow.loader import FlowLoader
from ephemeron.data.flow.stream import BatchStream
from ephemeron.data.flow.view import Flow, FlowReader, FlowView, LocalReader, random_split

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
