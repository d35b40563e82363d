"""`cloud deploy aws-microvm` and `cloud remove aws-microvm`: creation and removal of the image on AWS Lambda MicroVMs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from ephemeron.communication.channels.address import is_direct
from ephemeron.communication.channels.tls import for_functions
from ephemeron.functions.async_invoke.provider import Deployer, Deployment, Tell, account_of, again, outcome
from ephemeron.functions.aws.deploy.deployer import delete_log
from ephemeron.functions.aws.settings import delete_if_there
from ephemeron.functions.aws_microvm.deploy import image, policy
from ephemeron.functions.aws_microvm.deploy import image as images
from ephemeron.functions.aws_microvm.preflight import COMMAND, check_channel
from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings, client, refused
from ephemeron.functions.direct_transports import ENDPOINT_VARIABLE


class AwsMicrovmDeployer(Deployer[AwsMicrovmSettings]):
    settings, range_mb = AwsMicrovmSettings, (images.BASELINES_MB[0], images.BASELINES_MB[-1])

    def deploy(self, settings: AwsMicrovmSettings, wanted: Deployment, options: Mapping[str, Any], tell: Tell) -> None:
        images.check_sizes(wanted.sizes_mb)
        artifact, role, direct = options["artifact"], options["role"], is_direct(wanted.channel)
        check_channel(wanted.store, settings)
        place = policy.place_of(
            settings, account=account_of(role), channel=wanted.store, artifact=artifact, sizes_mb=wanted.sizes_mb, direct=direct
        )
        for path in policy.write(wanted.out, place):
            tell(f"wrote {path}")
        data = image.write_artifact(wanted.out / "image.zip", wanted.environment)
        tell(f"wrote {wanted.out / 'image.zip'} ({len(data) / 2**20:.1f} MB)")
        tell(f"functions have {wanted.environment}")
        if role is None:
            return tell(_next_steps(place, wanted, artifact))
        spec = images.ImageSpec(
            artifact=artifact,
            role=role,
            build_role=options["build_role"] or place.role_arn("build"),
            memory_mb=wanted.sizes_mb[0],
            variables={n: os.environ[n] for n in ("EPHEMERON_ENTRIES",) if n in os.environ}
            | ({} if wanted.store.startswith("s3:") else for_functions())
            | ({ENDPOINT_VARIABLE: "1"} if direct else {}),
            digest=wanted.environment.release,
        )
        bucket = urlsplit(artifact)
        try:
            # Without the endpoint of the MicroVM service: S3 has its own, AWS_ENDPOINT_URL_S3.
            objects = client(AwsMicrovmSettings(image=settings.image, region=settings.region), "s3", tries=5)
            objects.put_object(Bucket=bucket.netloc, Key=bucket.path[1:], Body=data)
        except Exception as e:
            raise refused(e, settings, doing=f"s3:PutObject to {artifact}") from e
        tell(f"uploaded {artifact}")
        for name, done in images.deploy(client(settings, tries=5), settings, spec, wanted.sizes_mb, told=tell).items():
            size = wanted.size_of(name, settings.image)
            what = f": baseline {size} MB, up to eight hours a function" if size else ", whose size is not wanted"
            tell(f"{done} image {name} in {settings.region}{what}")
        tell("while nothing runs, its snapshots cost $0.08 per GB and month, for a week at least; nothing else was made")
        tell(f"train with: ephemeron train JOB --platform aws-microvm --channel {wanted.channel} --workers 4")

    def describe(self, settings: AwsMicrovmSettings) -> str:
        return f"image {settings.image} in {settings.region}, in all its sizes, its MicroVMs and its log"

    def remove(self, settings: AwsMicrovmSettings, tell: Tell) -> None:
        api = client(settings, tries=5)
        known, refuse = images.images_of(api, settings), partial(refused, settings=settings)
        if not known:
            tell(f"there is no image {settings.image}")
        for name, arn in known.items():
            _terminate_all(api, arn, settings, tell)
            request = partial(api.delete_microvm_image, imageIdentifier=arn)
            tell(outcome(f"image {name}", delete_if_there(request, partial(refuse, doing="lambda:DeleteMicrovmImage"))))
        tell(delete_log(settings.log_group, settings.aws, refuse))
        tell("not touched: the stack of template.json, the image's code in S3, objects of runs in the bucket (ephemeron runs clean --all)")


def _terminate_all(api: Any, image_arn: str, settings: AwsMicrovmSettings, tell: Tell) -> None:
    def left() -> list[str]:
        pages = api.get_paginator("list_microvms").paginate(imageIdentifier=image_arn)
        return [i["microvmId"] for page in pages for i in page["items"] if i["state"] != "TERMINATED"]

    try:
        for id in (found := left()):
            api.terminate_microvm(microvmIdentifier=id)
        if found:
            tell(f"terminated {len(found)} MicroVMs")
        end = time.monotonic() + 120.0
        while found and left() and time.monotonic() < end:
            time.sleep(0.5)
    except Exception as e:
        raise refused(e, settings, doing="lambda:TerminateMicrovm") from e


def _next_steps(place: policy.MicrovmPlace, wanted: Deployment, artifact: str) -> str:
    named = "" if place.image == AwsMicrovmSettings().image else place.image
    command = again(COMMAND, wanted, image=named, region=place.region, artifact=artifact)
    return f"""
nothing was sent to AWS. Read these files, then:
  aws cloudformation deploy --region {place.region} --stack-name {place.image}-microvm --template-file {wanted.out}/template.json \\
      --capabilities CAPABILITY_NAMED_IAM
  {command} --role {place.role_arn("run")}"""
