"""Datasets, steps and collate functions that raise what is no `Exception`, or what has no text: an error of their sample."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest

from ephemeron.data.flow import Flow, LocalReader
from ephemeron.errors import SampleFailed


class Own(BaseException):
    pass


class NoText(Exception):
    def __str__(self):
        raise Own

    __repr__ = __str__


class Unsendable:
    def __reduce__(self):
        raise Own("cannot be pickled")


ERRORS = [asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, SystemExit, StopIteration, Own, NoText]


class Samples:
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3:
            if isinstance(self.error, Unsendable):
                return self.error
            raise self.error
        return np.full(2, index)


def read(error, loaders, **options):
    flow = Flow("me/x", version=1).dataset(Samples(error)).prepare_read(LocalReader(workers=loaders))
    return [np.asarray(batch)[:, 0].tolist() for batch in flow.to_shuffled(2, shuffle=False, **options)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_a_sample_that_raises_is_named_and_can_be_skipped(error):
    in_loader = 1
    with pytest.raises(SampleFailed, match=rf"sample 3, step 'read': {error.__name__}\b"):
        read(error, in_loader)
    assert read(error, in_loader, on_error="skip") == [[0, 1], [2], [4, 5]]
    if error is not KeyboardInterrupt:  # which is Ctrl-C in the main thread of a client
        with pytest.raises(SampleFailed, match=rf"sample 3, step 'read': {error.__name__}\b"):
            read(error, 0)
        assert read(error, 0, on_error="skip") == [[0, 1], [2], [4, 5]]


def test_a_sample_that_raises_where_it_is_pickled_is_named():
    with pytest.raises(SampleFailed, match=re.escape("its result cannot be sent: Own: cannot be pickled")):
        read(Unsendable(), 1, collate_fn=list)


def test_what_a_collate_function_raises_is_an_error_of_the_batch():
    def collate(samples):
        raise asyncio.CancelledError("no batch")

    for loaders in (0, 1):
        with pytest.raises(SampleFailed, match=r"sample 0, step 'collate': 2 samples .*: CancelledError: no batch"):
            read(ValueError, loaders, collate_fn=collate)


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_batch_that_cannot_be_put_together_names_the_odd_sample(loaders):
    class Ragged(Samples):
        def __getitem__(self, index):
            return {"x": np.zeros(3 if index == 4 else 2), "y": index}

    flow = Flow("me/x", version=1).dataset(Ragged(None)).prepare_read(LocalReader(workers=loaders))
    said = r"sample 3, step 'collate': 3 .*; sample 4 is {x: ndarray\[3\], y: int}, sample 3 is {x: ndarray\[2\], y: int}"
    with pytest.raises(SampleFailed, match=said):
        list(flow.to_shuffled(3, shuffle=False))
