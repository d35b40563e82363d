"""`ephemeron data import | ls | verify | benchmark | status`: describe data, verify it, and show who loads it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ephemeron.cli.serve.data import service_folder
from ephemeron.units import human_count

if TYPE_CHECKING:
    from ephemeron.data import Flow
    from ephemeron.data.catalog import Dataset, DatasetStore
    from ephemeron.data.catalog.check import VariantVerification
    from ephemeron.data.service import Service
    from ephemeron.data.service.messages import FlowEntry, RouterStatus

F = TypeVar("F", bound=Callable[..., Any])

KINDS = ("images", "coco", "librispeech", "cifar10", "cifar100", "idx", "npz", "csv", "parquet")


def _store_option(command: F) -> F:
    return click.option(
        "--store",
        metavar="URL",
        help="Folder, s3://bucket/prefix, gs://… or az://… that holds the metadata.  [default: ~/.ephemeron/datasets-store]",
    )(command)


_DEFECTS = 10
"""Printed by an import; all of them are listed in a file."""


@click.group(short_help="Describe datasets once, verify and read them anywhere.")
def data() -> None:
    """Describe datasets once, and read them in the same way wherever they are stored.

    \b
    ephemeron data import images photos/train me/photos            a folder per class becomes me/photos, variant train
    ephemeron data import images photos/val me/photos --variant val
    ephemeron data import idx mnist/ core/mnist                    train and test, from MNIST's own files
    ephemeron data import coco s3://b/train2017 core/mscoco -o annotations=annotations/instances_train2017.json
    ephemeron data ls                                              all datasets; with a name: its versions and variants
    ephemeron data verify core/mnist                               is the data still what was imported?
    ephemeron data benchmark flows:train --workers 2               which step of a data flow is the bottleneck?
    ephemeron data status                                          flows, readers and loaders of `ephemeron serve data`

    An import reads the data and writes a description of it (location, target and decoder of each sample) into a store. The data is neither copied nor changed. Every import is a new version; versions do not change.
    """


@data.command("import")
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("source")
@click.argument("name", metavar="NAMESPACE/NAME")
@_store_option
@click.option("--variant", metavar="NAME", help="train, val, …  [default: train, or all that SOURCE tells apart]")
@click.option("--version", metavar="NAME", help="Name of the new version.  [default: the next whole number]")
@click.option("--only", is_flag=True, help="Leave out variants of the version before instead of keeping them.")
@click.option("-o", "--option", "options", multiple=True, metavar="NAME=VALUE", help="Option of the kind; may be repeated.")
@click.option("--copy", is_flag=True, help="Copy SOURCE (a local folder or file) into the dataset's own data folder.")
@click.option(
    "--digests/--no-digests", default=True, show_default=True, help="Pin the content, so that a change is noticed; reads local data once."
)
@click.option(
    "--on-defect",
    type=click.Choice(["fail", "skip", "quarantine"]),
    default="fail",
    show_default=True,
    help="What to do with a bad row, an empty or an absent file; quarantine keeps a copy.",
)
@click.option("--shard-size", type=click.IntRange(1), help="Samples per metadata file.  [default: 1000]")
@click.option("--json", "as_json", is_flag=True, help="Print the new version as one line of JSON.")
def import_(
    kind: str,
    source: str,
    name: str,
    store: str | None,
    variant: str | None,
    version: str | None,
    only: bool,
    options: tuple[str, ...],
    copy: bool,
    digests: bool,
    on_defect: str,
    shard_size: int | None,
    as_json: bool,
) -> None:
    """Describe SOURCE (folder, .tar, .zip, file or URL) as a new version of NAMESPACE/NAME.

    \b
    KIND         SOURCE                                           options (-o name=value)
    images       CLASS/….jpg, a folder per class
    coco         the images                                       annotations=instances_….json (path or URL)
    librispeech  SPEAKER/CHAPTER/….flac and .trans.txt
    cifar10      the unpacked folder, binary or python version
    cifar100     the same                                         labels=fine|coarse
    idx          a folder with train-images-idx3-ubyte[.gz] …
    npz          a file by numpy.savez                            inputs=x  targets=y
    csv          tables with a header line                        target=COLUMN  delimiter=;
    parquet      a file or folder                                 target=COLUMN  data=COLUMN  decoder=image

    \b
    ephemeron data import librispeech LibriSpeech/dev-clean core/librispeech --variant dev-clean
    ephemeron data import parquet s3://bucket/rows me/rows -o target=label -o data=image.bytes --store s3://bucket/catalog
    """
    from ephemeron.data.catalog import SHARD_SIZE, DatasetStore
    from ephemeron.data.catalog.importers import import_dataset
    from ephemeron.errors import JobError

    pairs = [option.partition("=") for option in options]
    for key, equals, _ in pairs:
        if not equals:
            raise JobError(f"-o {key} has no value", remedy=f"write -o {key}=VALUE")
    place = DatasetStore.open(store)
    with _Counter() as tell:
        made = import_dataset(
            kind,
            source,
            name,
            place,
            variant=variant,
            version=version,
            keep=not only,
            copy=copy,
            options={key: value for key, _, value in pairs},
            shard_size=shard_size or SHARD_SIZE,
            digests=digests,
            on_defect=on_defect,
            tell=tell,
        )
    for imported, v in made.variants.items():
        if v.source.get("url") == source and v.defects:
            _print_defects(place, made, imported, v.defects.file)
    if as_json:
        click.echo(json.dumps(_row(made)))
        return
    for variant, v in made.variants.items():
        if v.source.get("url") == source and v.info.get("passed_over"):
            click.echo(f"note: {variant}: passed over in {source}: {human_count(v.info['passed_over'], 'file')}, no images", err=True)
    kept = ", ".join(f"{n} ({human_count(v.samples, 'sample')})" for n, v in made.variants.items())
    click.echo(f"published {made}: {kept}")


@data.command()
@click.argument("name", required=False, metavar="[NAMESPACE/NAME]")
@_store_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def ls(name: str | None, store: str | None, as_json: bool) -> None:
    """List datasets; or, with a name, all versions of one."""
    from ephemeron.data.catalog import DatasetStore

    place = DatasetStore.open(store)
    if name is None:
        found = [place.dataset(one) for one in place.names()]
    else:
        latest = place.dataset(name)
        found = [place.dataset(name, version) for version in latest.history]
    if as_json:
        for one in found:
            click.echo(json.dumps(_row(one)))
        return
    if not found:
        click.echo(f"no datasets in {place.files.url}; describe one with: ephemeron data import --help")
        return
    from rich.table import Table

    from ephemeron.cli.terminal import make_console

    table = Table("dataset", "version", "variant", "samples", "parts", "data", box=None, pad_edge=False)
    for one in found:
        for variant, v in one.variants.items():
            parts = ", ".join(f"{part}: {o['decoder']}" for part, o in v.decoders.items())
            table.add_row(one.name, one.version, variant, str(v.samples), parts, v.root or "own folder")
    make_console(for_tables=True).print(table)


@data.command()
@click.argument("name", metavar="NAMESPACE/NAME")
@_store_option
@click.option("--version", default="latest", show_default=True, help="Version to verify.")
@click.option("--variant", "variants", multiple=True, help="Verify only this variant (repeatable).")
@click.option(
    "--digests/--no-digests",
    default=True,
    show_default=True,
    help="Compare content with the digests taken at import; this may read all data.",
)
@click.option("--sample", type=click.IntRange(0), default=100, show_default=True, help="Number of samples to decode.")
@click.option("--all", "everything", is_flag=True, help="Decode all samples.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per variant.")
def verify(
    name: str, store: str | None, version: str, variants: tuple[str, ...], digests: bool, sample: int, everything: bool, as_json: bool
) -> None:
    """Verify the data of NAME against its metadata.

    Checks every metadata shard and every byte range, compares all content with the digests that were taken when it was
    imported (objects that are pinned by their ETags are only listed), and, where no content has changed, decodes some or
    all samples. Each defect is one line on standard error; the exit code is 1 if there is any.

    \b
    ephemeron data verify core/mnist --all
    ephemeron data verify me/photos --version 2 --variant val --sample 1000
    ephemeron data verify me/photos --no-digests                  structure and some samples, without reading everything
    """
    from ephemeron.data.catalog import DatasetStore
    from ephemeron.data.catalog.check import unreferenced, verify_variant

    place = DatasetStore.open(store)
    dataset = place.dataset(name, version)
    decode = None if everything else sample
    with _Counter() as tell:
        found = [verify_variant(place, dataset, v, decode=decode, digests=digests, tell=tell) for v in variants or dataset.variants]
    for one in found:
        _print_verification(dataset, one, digests=digests, as_json=as_json)
    if idle := unreferenced(place, name):
        click.echo(f"note: {len(idle)} metadata files belong to no version ({sum(idle.values())} bytes)", err=True)
    if any(one.defects for one in found):
        sys.exit(1)


@data.command()
@click.argument("flow", metavar="MODULE:NAME|JOB.toml")
@click.option(
    "--code",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
    show_default=True,
    help="Folder that contains MODULE.",
)
@click.option("--batch-size", type=click.IntRange(1), help="Samples per batch.  [default: 64, or the job's]")
@click.option("--batches", type=click.IntRange(2), default=20, show_default=True, help="Batches to read, at most an epoch.")
@click.option("--workers", type=click.IntRange(0), help="Loader processes.  [default: 2, or the job's]")
@click.option(
    "--step-s",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Seconds that training takes per batch; 0 reads as fast as it can.",
)
@click.option("--on-error", help="fail, skip or retry:N.  [default: skip, or the job's]")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def benchmark(
    flow: str, code: Path, batch_size: int | None, batches: int, workers: int | None, step_s: float, on_error: str | None, as_json: bool
) -> None:
    """Read some batches of a data flow and report its bottleneck.

    MODULE:NAME is a Flow, or a function that returns one; a job file names one, and gives defaults for the options.

    \b
    ephemeron data benchmark flows:train --batch-size 128 --workers 4 --step-s 0.2
    ephemeron data benchmark job.toml
    """
    from ephemeron.data.flow.benchmark import benchmark_flow
    from ephemeron.data.flow.from_job import make_flow

    job = _FlowOfJob.read(flow) if flow.endswith((".toml", ".json")) else _FlowOfJob(flow=make_flow(flow, {}, [code]))
    found = benchmark_flow(
        job.flow,
        batch_size=batch_size or job.batch_size,
        workers=job.workers if workers is None else workers,
        on_error=on_error or job.on_error,
        collate_fn=job.collate_fn,
        batches=batches,
        step_s=step_s,
    )
    if as_json:
        click.echo(json.dumps(found.to_dict()))
        return
    c = found.counters
    click.echo(
        f"{found.flow}: {c.batches} batches of {found.batch_size} with {human_count(found.workers, 'loader')}, {found.samples_per_s:.0f} samples/s"
    )
    stages, together = c.loading.by_stage, sum(c.loading.by_stage.values()) or 1.0
    for stage, seconds in sorted(stages.items(), key=lambda item: -item[1]):
        click.echo(f"  {stage:16} {1000 * seconds / max(1, c.samples):9.3f} ms per sample  {seconds / together:4.0%}")
    for count, noun, what in ((c.skipped, "sample", "failed, passed over"), (c.lost_loaders, "loader", "died")):
        if count:
            click.echo(f"  {human_count(count, noun)} {what}")
    click.echo(c.advice())


@data.command()
@click.option(
    "--address", metavar="HOST:PORT", help="Address of the service.  [default: EPHEMERON_DATA_SERVICE, else that of this machine]"
)
@service_folder
@click.option("--delete", metavar="NAME", help="Remove a flow that has no readers.")
@click.option("--watch", is_flag=True, help="Repeat every second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def status(address: str | None, folder: Path | None, delete: str | None, watch: bool, as_json: bool) -> None:
    """Show the flows of a data service with their states, readers, loaders and caches.

    \b
    ephemeron data status
    ephemeron data status --address 10.0.0.5:7070 --watch              with EPHEMERON_DATA_TOKEN set
    """
    from ephemeron.config.paths import home
    from ephemeron.data.flow_spec import SERVICE_VARIABLE
    from ephemeron.data.service import Service
    from ephemeron.data.service.daemon import ManagedProcess
    from ephemeron.data.service.messages import FlowRequest
    from ephemeron.data.service.protocol import DELETE_FLOW
    from ephemeron.errors import ServiceUnreachable

    if address is None and folder is None:  # as readers find it
        address = os.environ.get(SERVICE_VARIABLE) or None
    if address is None:  # do not start one to ask it
        place = folder or home() / "data-service"
        if not ManagedProcess("coordinator", place, "").alive:
            raise ServiceUnreachable(f"no data service runs with folder {place}; start one with: ephemeron serve data")
    service = Service(address, folder=folder, timeout_s=5.0)
    if delete is not None:
        service.call(DELETE_FLOW, FlowRequest(flow=delete))
    while True:
        _print_flows(service, as_json)
        if not watch:
            return
        time.sleep(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRow:
    """Status of a flow, with sums over its shards."""

    flow: str
    version: int
    state: str
    samples: int
    readers: int
    shards: int
    loaders: int
    loaded: int
    hits: int
    """Samples that were found finished in the cache."""
    half_hits: int
    """Samples of which the cached steps were found."""
    skipped: int
    cached_bytes: int
    buffered_bytes: int


def _print_flows(service: Service, as_json: bool) -> None:
    from ephemeron.data.service.messages import Nothing, RouterStatus
    from ephemeron.data.service.protocol import LIST_FLOWS
    from ephemeron.units import human_bytes

    found = service.call(LIST_FLOWS, Nothing())
    rows = [_flow_row(entry, found.routers.get(entry.name, RouterStatus())) for entry in found.flows]
    if as_json:
        click.echo(json.dumps({"flows": [asdict(row) for row in rows]}))
        return
    if not rows:
        click.echo("no flows are registered")
    for r in rows:
        click.echo(
            f"{r.flow}@{r.version}: {r.state}, {human_count(r.samples, 'sample')}; {human_count(r.readers, 'reader')}, {r.loaders} "
            f"loaders; {r.loaded} loaded, {r.hits} found finished, {r.half_hits} half-finished; "
            f"{human_bytes(r.cached_bytes)} kept, {human_bytes(r.buffered_bytes)} ahead"
        )


def _flow_row(entry: FlowEntry, router: RouterStatus) -> FlowRow:
    shards = router.shards
    return FlowRow(
        flow=entry.name,
        version=entry.version,
        state=entry.state,
        samples=entry.samples,
        readers=router.readers,
        shards=len(shards),
        loaders=sum(s.loaders for s in shards),
        loaded=sum(s.loaded for s in shards),
        hits=sum(s.hits for s in shards),
        half_hits=sum(s.half_hits for s in shards),
        skipped=sum(s.skipped for s in shards),
        cached_bytes=sum(s.cached_bytes for s in shards),
        buffered_bytes=sum(s.buffered_bytes for s in shards),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlowOfJob:
    """A flow, and how a job reads it."""

    flow: Flow
    batch_size: int = 64
    workers: int = 2
    on_error: str = "skip"
    collate_fn: Callable[[list[Any]], Any] | None = None

    @classmethod
    def read(cls, path: str) -> _FlowOfJob:
        """The flow of a job file."""
        from ephemeron.config.typed import build
        from ephemeron.data.flow.from_job import arguments_of, collate_of, make_flow
        from ephemeron.errors import JobError
        from ephemeron.training.job import Configuration, load_job

        job = load_job(path)
        data = job.data
        if data.flow is None:
            raise JobError(f"{path} names no flow", remedy="give data.flow, or MODULE:FUNCTION")
        return cls(
            flow=make_flow(data.flow, arguments_of(data), job.code),
            workers=data.loaders,
            on_error=data.on_error,
            batch_size=build(Configuration, job.run, where=path).batch_size,
            collate_fn=collate_of(data.collate, job.code),
        )


def _print_verification(dataset: Dataset, one: VariantVerification, *, digests: bool, as_json: bool) -> None:
    from ephemeron.units import human_bytes

    for defect in one.defects:
        click.secho(defect, fg="red", err=True)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "dataset": dataset.name,
                    "version": dataset.version,
                    "variant": one.variant,
                    "samples": one.samples,
                    "files": one.files,
                    "bytes": one.stored_bytes,
                    "pinned": one.pinned,
                    "unpinned": one.unpinned,
                    "decoded": one.decoded,
                    "defects": list(one.defects),
                }
            )
        )
        return
    verdict = f"{len(one.defects)} defects" if one.defects else "no defects"
    bare = f", {one.unpinned} have no digest (import them again)" if one.unpinned else ""
    compared = f", {one.pinned} of {one.samples} compared with their digests{bare}" if digests else ""
    click.echo(
        f"{dataset}, {one.variant}: {human_count(one.samples, 'sample')} in {human_count(one.files, 'file')} ({human_bytes(one.stored_bytes)})"
        f"{compared}, {one.decoded} decoded: {verdict}"
    )


def _print_defects(store: DatasetStore, dataset: Dataset, variant: str, listed: str) -> None:
    from ephemeron.data.catalog.dataset import meta_folder

    defects = store.defects(dataset, variant)
    for defect in defects[:_DEFECTS]:
        place = ", ".join(part for part in (defect.file, defect.at) if part)
        click.echo(f"skipped: {place}: {defect.reason}", err=True)
    path = f"{store.files.url}/{meta_folder(dataset.name)}/{listed}"
    click.echo(f"{len(defects)} defects in {dataset}, {variant}; all of them: {path}", err=True)


def _row(dataset: Dataset) -> dict[str, object]:
    variants = {
        name: {
            "samples": v.samples,
            "defects": v.defects.count if v.defects else 0,
            "shards": len(v.shards),
            "root": v.root,
            "decoders": v.decoders,
        }
        for name, v in dataset.variants.items()
    }
    return {"dataset": dataset.name, "version": dataset.version, "number": dataset.number, "variants": variants}


class _Counter:
    """Progress on one line of a terminal; nothing elsewhere."""

    def __enter__(self) -> Callable[[str, int, int | None], None]:
        self._shown = sys.stderr.isatty()
        return self._tell

    def _tell(self, what: str, done: int, total: int | None) -> None:
        if self._shown:
            click.echo(f"\r\x1b[K{what}: {done}{f' of {total}' if total else ''}", nl=False, err=True)

    def __exit__(self, *exc: object) -> None:
        if self._shown:
            click.echo("\r\x1b[K", nl=False, err=True)
