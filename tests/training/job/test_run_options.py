"""Options of a run by dotted names: which value of a table overrides which."""

import pytest

from ephemeron.errors import JobError
from ephemeron.training.driver import configure
from ephemeron.training.job import Configuration, ExchangeOptions, Job, RegionOptions, RunRegion, StageOptions
from ephemeron.training.job.run_options import flat, merged, nested, values_of

REGIONS = (RunRegion(name="near", workers=1), RunRegion(name="far", workers=1))


def job(**run):
    return Job(name="j", model="m:b", run=run)


def test_dotted_names_and_back():
    options = {"workers": 2, "stages": {"count": 2, "micro_batches": 4}}
    assert flat(options) == {"workers": 2, "stages.count": 2, "stages.micro_batches": 4}
    assert nested(flat(options)) == options
    assert flat({"stages": StageOptions(count=2)}) == {"stages.count": 2}, "what is the default is not given"
    assert flat(flat(options)) == flat(options)


def test_values_of_a_configuration_make_an_equal_one():
    c = Configuration(workers=4, stages={"count": 2, "micro_batches": 4}, exchange={"compression": "bf16"}).resolved()
    assert Configuration(**nested(values_of(c))) == c


def test_a_mapping_overrides_keys_and_a_value_of_the_class_the_table():
    own = {"exchange": {"local_steps": 4, "compression": "bf16"}, "workers": 3}
    assert merged(own, {"exchange": {"local_steps": 2}}) == {"exchange.local_steps": 2, "exchange.compression": "bf16", "workers": 3}
    assert merged(own, {"exchange": ExchangeOptions(local_steps=2)}) == {"exchange.local_steps": 2, "workers": 3}
    c = configure(job(**own), platform="simulated", exchange={"local_steps": 2})
    assert (c.exchange.local_steps, c.exchange.compression, c.exchange.quantity) == (2, "bf16", "deltas")
    assert configure(job(**own), platform="simulated", exchange=ExchangeOptions()).exchange == ExchangeOptions(quantity="gradients")


def test_a_file_of_regions_replaces_regions_and_not_how_they_exchange():
    own = {"regions": {"region": REGIONS, "store": "s3://b/x"}}
    assert merged(own, {"regions": {"file": "r.toml"}}) == {"regions.file": "r.toml", "regions.store": "s3://b/x"}
    assert merged({"regions": {"file": "r.toml"}}, {"regions": {"region": REGIONS}}) == {"regions.region": REGIONS}


def test_regions_are_given_once():
    with pytest.raises(JobError, match=r"regions\.file and regions\.region both name the regions"):
        configure(job(), regions=RegionOptions(file="r.toml", region=REGIONS))


def test_a_table_that_contradicts_a_flag_gives_way_key_by_key():
    notes = []
    c = configure(job(stages={"count": 2, "replicas": 2}), on_note=notes.append, platform="simulated", workers=2)
    assert (c.workers, c.stages.count) == (2, 1)
    assert notes == ["left out of the job's [run], because what was given now contradicts it: stages.count = 2"]


def test_an_unknown_key_of_a_table_is_named_with_it():
    with pytest.raises(JobError, match=r"configuration: stages: unknown key micro_batch; did you mean micro_batches\?"):
        configure(job(), stages={"micro_batch": 2})
