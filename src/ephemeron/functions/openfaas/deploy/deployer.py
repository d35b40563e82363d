"""`cloud deploy openfaas` and `cloud remove openfaas`: creation and removal of the function on OpenFaaS."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ephemeron.communication.channels.tls import for_functions
from ephemeron.communication.direct.transport import listening_variables
from ephemeron.errors import GatewayError, JobError
from ephemeron.functions.async_invoke.provider import Deployer, Deployment, Tell, again, outcome
from ephemeron.functions.openfaas import preflight
from ephemeron.functions.openfaas.deploy import function
from ephemeron.functions.openfaas.deploy import function as functions
from ephemeron.functions.openfaas.gateway import FunctionSpec, refused
from ephemeron.functions.openfaas.handler import SECRETS
from ephemeron.functions.openfaas.platform import LIMITS
from ephemeron.functions.openfaas.preflight import functions_of, gateway_of_one
from ephemeron.functions.openfaas.settings import INSIDE, OpenFaasSettings, check_url

_STORE_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP")
"""Variables that locate an S3 store. None of them is a secret."""
_ENTRIES = ("EPHEMERON_ENTRIES",)


class OpenFaasDeployer(Deployer[OpenFaasSettings]):
    settings, range_mb = OpenFaasSettings, (128, LIMITS.memory_max_mb)

    def deploy(self, settings: OpenFaasSettings, wanted: Deployment, options: Mapping[str, Any], tell: Tell) -> None:
        image, inside, replicas, out = options["image"], options["inside"] or INSIDE, options["replicas"], wanted.out
        check_url(inside, "--inside")
        preflight.check_channel(wanted.store, settings, {})
        secrets = _secrets(options["s3_keys"])
        located = _given(_STORE_VARIABLES) if wanted.store.startswith("s3:") else for_functions()
        common = functions.DeploymentSpec(
            image=image or "not yet built",
            memory_mb=wanted.sizes_mb[0],
            lifetime_s=options["function_timeout_s"],
            replicas=replicas,
            cpus=options["cpus"],
            inside=inside.rstrip("/"),
            secrets=tuple(secrets),
            labels=wanted.labels,
            digest=wanted.environment.release,
            variables=_given(_ENTRIES) | listening_variables(wanted.channel) | located,
        )
        specs = functions.specs_of(common, settings, wanted.sizes_mb)
        for path in function.write_recipe(out, wanted.environment, kit=options["contract_kit"]):
            tell(f"wrote {path}")
        values = out / "openfaas-values.yaml"
        values.write_text(functions.gateway_values(common))
        tell(f"wrote {values}")
        tell(f"functions have {wanted.environment}")
        if image is None:
            command = again(
                preflight.COMMAND,
                wanted,
                function="" if settings.function == OpenFaasSettings().function else settings.function,
                namespace=settings.namespace,
                openfaas_gateway=settings.gateway,
                cpus=options["cpus"],
                function_timeout_s=options["function_timeout_s"],
                replicas=replicas,
                inside=options["inside"],
                s3_keys=options["s3_keys"],
                contract_kit=options["contract_kit"],
            )
            return tell(f"""
nothing was sent to {settings.gateway}. Read these files, then:
  {out}/build.sh REGISTRY/ephemeron:1
  helm upgrade openfaas openfaas/openfaas -n openfaas --reuse-values -f {values}
  {command} --image REGISTRY/ephemeron:1""")
        done = _deploy_all(specs, secrets, settings, tell)
        for spec in specs:
            tell(
                f"{done[spec.service]} function {spec.service} at {settings.gateway}: {spec.memory_mb} MB, {spec.cpus:g} CPUs, "
                f"calls of up to {common.lifetime_s:g} s, up to {replicas} replicas"
            )
        if secrets:
            tell(f"with secrets {', '.join(secrets)}")
        each = "of each " if len(specs) > 1 else ""
        tell(f"one replica {each}stays up and holds its memory; `ephemeron cloud remove openfaas` removes everything")
        where = f"--openfaas-gateway {settings.gateway} --channel {wanted.channel}"
        tell(f"train with: ephemeron train JOB --platform openfaas {where} --workers {max(1, min(4, replicas - 1))}")

    def describe(self, settings: OpenFaasSettings) -> str:
        return f"function {settings.function} at {settings.gateway}, in all its sizes, and its secrets"

    def remove(self, settings: OpenFaasSettings, tell: Tell) -> None:
        api = preflight.gateway_of(settings)
        try:
            names = functions_of(settings) or [settings.function]
        except GatewayError as e:
            raise refused(e, settings, doing="asking about") from e
        for name in names:
            tell(outcome(f"function {name}", _delete(f"function {name}", settings, gateway_of_one(settings, name).delete)))
        for secret in SECRETS:
            if _delete(f"secret {secret}", settings, partial(api.delete_secret, secret)):
                tell(f"deleted secret {secret}")
        tell("not touched: the image in its registry, objects of runs in the store (ephemeron runs clean --all)")


def _delete(what: str, settings: OpenFaasSettings, request: Callable[[], None]) -> bool:
    """Makes a request; False: there was no such thing."""
    try:
        request()
    except GatewayError as e:
        if e.status != 404:
            raise refused(e, settings, doing=f"deleting {what} for") from e
        return False
    return True


def _deploy_all(specs: Sequence[FunctionSpec], secrets: Mapping[str, str], settings: OpenFaasSettings, tell: Tell) -> dict[str, str]:
    """Creates or updates functions, and deletes those of other sizes; returns what was done, by function."""
    api = preflight.gateway_of(settings)
    try:
        for name, value in secrets.items():
            api.set_secret(name, value)
        before = functions_of(settings)
        done = {spec.service: gateway_of_one(settings, spec.service).deploy(spec) for spec in specs}
        for name in before:
            if name not in done:
                gateway_of_one(settings, name).delete()
                tell(f"deleted function {name} at {settings.gateway}, whose size is not wanted")
    except GatewayError as e:
        if e.status in (400, 404):  # about the deployment, not about what is deployed
            text = f"the gateway at {settings.gateway} refuses this function: {e.text or e.status}"
            raise JobError(text, remedy="see the message") from e
        raise refused(e, settings, doing="deploying") from e
    return done


def _given(names: Sequence[str]) -> dict[str, str]:
    """Those of the variables that this environment has."""
    return {name: os.environ[name] for name in names if name in os.environ}


def _secrets(s3_keys: bool) -> dict[str, str]:
    """Values of the secrets to create, by name."""
    found = {}
    for name, variable in SECRETS.items():
        if variable.startswith("AWS_"):
            if not s3_keys:
                continue
            if variable not in os.environ:
                raise JobError(f"--s3-keys: {variable} is not set", remedy="set it, or leave --s3-keys out")
        if os.environ.get(variable):
            found[name] = os.environ[variable]
    return found
