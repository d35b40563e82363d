"""`ephemeron cloud deploy aws-microvm` and `ephemeron cloud remove aws-microvm`: creation and removal of the image on AWS Lambda MicroVMs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from ephemeron.errors import JobError

if TYPE_CHECKING:
    from ephemeron.functions.aws_microvm.deploy.policy import MicrovmPlace
    from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings

_ACCOUNT = "ACCOUNT"


def _where(command: Any) -> Any:
    for option in (
        click.option("--endpoint", metavar="URL", help="Another service of MicroVMs, such as the local one."),
        click.option("--region", metavar="REGION", help="Region of the image.  [default: as for all AWS clients]"),
        click.option("--image", default="ephemeron", show_default=True, metavar="NAME", help="Name of the image."),
    ):
        command = option(command)
    return command


@click.command("aws-microvm")
@_where
@click.option("--channel", required=True, metavar="ADDRESS", help="Channel that functions may use: s3://bucket/prefix or rediss://…")
@click.option("--artifact", required=True, metavar="S3_URI", help="Where the image's code is uploaded: s3://bucket/key.zip.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("aws-microvm"),
    show_default=True,
    help="Folder for the code, the policies and the template.",
)
@click.option(
    "--memory-mb",
    metavar="MB[,MB…]",
    default="2048",
    show_default=True,
    help="Baselines, one image for each; the first is for runs that name none. 2,048 MB bring one vCPU.",
)
@click.option("--role", metavar="ARN", help="Role of MicroVMs, which template.json creates. Without it nothing is uploaded.")
@click.option("--build-role", metavar="ARN", help="Role of the image's build.  [default: that of template.json]")
def deploy_microvm(
    image: str,
    region: str | None,
    endpoint: str | None,
    channel: str,
    artifact: str,
    out: Path,
    memory_mb: str,
    role: str | None,
    build_role: str | None,
) -> None:
    """Write what AWS Lambda MicroVMs need into a folder, for review; with --role, also build the image.

    The image is a snapshot in which PyTorch is imported. It holds no secrets: a cache's password is taken from
    EPHEMERON_CHANNEL_PASSWORD when a run starts. A cache's certificate authority is no secret, and is taken from
    EPHEMERON_CHANNEL_CA into the image. A build takes minutes.
    """
    from ephemeron.communication.channels import public_address
    from ephemeron.communication.channels.address import is_direct, store_address
    from ephemeron.communication.channels.tls import for_functions
    from ephemeron.functions.async_invoke.sizes import function_of, parse_sizes
    from ephemeron.functions.aws_microvm.deploy import image as images
    from ephemeron.functions.aws_microvm.deploy import package, policy
    from ephemeron.functions.aws_microvm.preflight import check_channel
    from ephemeron.functions.aws_microvm.settings import client, refused
    from ephemeron.functions.direct_transports import ENDPOINT_VARIABLE
    from ephemeron.functions.source_bundle import digest

    public, secrets = public_address(channel)
    if secrets:
        raise JobError("credentials do not belong in --channel", remedy="set EPHEMERON_CHANNEL_PASSWORD instead")
    sizes = parse_sizes(memory_mb, low_mb=images.BASELINES_MB[0], high_mb=images.BASELINES_MB[-1])
    images.check_sizes(sizes)
    settings = _settings(image, region, endpoint)
    store = store_address(public)
    check_channel(store, settings)
    account = role.split(":")[4] if role and role.count(":") >= 5 else _ACCOUNT
    place = policy.place_of(settings, account=account, channel=store, artifact=artifact, sizes_mb=sizes, direct=is_direct(public))
    for path in policy.write(out, place):
        click.echo(f"wrote {path}")
    data = package.write_artifact(out / "image.zip")
    click.echo(f"wrote {out / 'image.zip'} ({len(data) / 2**20:.1f} MB)")
    if role is None:
        _next_steps(out, place, public, artifact)
        return
    wanted = images.ImageSpec(
        artifact=artifact,
        role=role,
        build_role=build_role or place.role_arn("build"),
        memory_mb=sizes[0],
        variables={n: os.environ[n] for n in ("EPHEMERON_ENTRIES",) if n in os.environ}
        | ({} if store.startswith("s3:") else for_functions())
        | ({ENDPOINT_VARIABLE: "1"} if is_direct(public) else {}),
        digest=digest(),
    )
    bucket = urlsplit(artifact)
    try:
        # Without the endpoint of the MicroVM service: S3 has its own, AWS_ENDPOINT_URL_S3.
        objects = client(_settings(image, region, None), "s3", tries=5)
        objects.put_object(Bucket=bucket.netloc, Key=bucket.path[1:], Body=data)
    except Exception as e:
        raise refused(e, settings, doing=f"s3:PutObject to {artifact}") from e
    click.echo(f"uploaded {artifact}")
    for name, done in images.deploy(client(settings, tries=5), settings, wanted, sizes, told=click.echo).items():
        size = next((mb for mb in sizes if function_of(image, sizes, mb) == name), 0)
        what = f": baseline {size} MB, up to eight hours a function" if size else ", whose size is not wanted"
        click.echo(f"{done} image {name} in {settings.region}{what}")
    click.echo("while nothing runs, its snapshots cost $0.08 per GB and month, for a week at least; nothing else was made")
    click.echo(f"train with: ephemeron train JOB --platform aws-microvm --channel {public} --workers 4")


@click.command("aws-microvm")
@_where
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def remove_microvm(image: str, region: str | None, endpoint: str | None, yes: bool) -> None:
    """Terminate the MicroVMs of the images of all sizes, delete these and their log, and list what is not deleted."""
    from ephemeron.functions.aws_microvm.deploy.image import images_of
    from ephemeron.functions.aws_microvm.settings import client

    settings = _settings(image, region, endpoint)
    if not yes:
        click.confirm(f"delete image {image} in {settings.region}, in all its sizes, its MicroVMs and its log?", abort=True)
    api = client(settings, tries=5)
    known = images_of(api, settings)
    if not known:
        click.echo(f"there is no image {image}")
    for name, arn in known.items():
        _terminate_all(api, arn, settings)
        request = partial(api.delete_microvm_image, imageIdentifier=arn)
        _delete(f"image {name}", settings, "lambda:DeleteMicrovmImage", request)
    _delete(
        f"log {settings.log_group}",
        settings,
        "logs:DeleteLogGroup",
        lambda: client(settings, "logs", tries=5).delete_log_group(logGroupName=settings.log_group),
    )
    click.echo(
        "not touched: the stack of template.json, the image's code in S3, objects of runs in the bucket (ephemeron runs clean --all)"
    )


def _terminate_all(api: Any, image_arn: str, settings: AwsMicrovmSettings) -> None:
    import time

    from ephemeron.functions.aws_microvm.settings import refused

    def left() -> list[str]:
        pages = api.get_paginator("list_microvms").paginate(imageIdentifier=image_arn)
        return [i["microvmId"] for page in pages for i in page["items"] if i["state"] != "TERMINATED"]

    try:
        for id in (found := left()):
            api.terminate_microvm(microvmIdentifier=id)
        if found:
            click.echo(f"terminated {len(found)} MicroVMs")
        end = time.monotonic() + 120.0
        while found and left() and time.monotonic() < end:
            time.sleep(0.5)
    except Exception as e:
        raise refused(e, settings, doing="lambda:TerminateMicrovm") from e


def _delete(what: str, settings: AwsMicrovmSettings, action: str, request: Callable[[], Any]) -> None:
    from ephemeron.functions.aws.settings import code_of
    from ephemeron.functions.aws_microvm.settings import refused

    try:
        request()
        click.echo(f"deleted {what}")
    except Exception as e:
        if code_of(e) != "ResourceNotFoundException":
            raise refused(e, settings, doing=action) from e
        click.echo(f"there is no {what}")


def _settings(image: str, region: str | None, endpoint: str | None) -> AwsMicrovmSettings:
    from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings

    return AwsMicrovmSettings(image=image, region=region, endpoint=endpoint).located()


def _next_steps(out: Path, place: MicrovmPlace, channel: str, artifact: str) -> None:
    click.echo(f"""
nothing was sent to AWS. Read these files, then:
  aws cloudformation deploy --region {place.region} --stack-name {place.image}-microvm --template-file {out}/template.json \\
      --capabilities CAPABILITY_NAMED_IAM
  ephemeron cloud deploy aws-microvm --channel {channel} --artifact {artifact} --role {place.role_arn("run")}""")
