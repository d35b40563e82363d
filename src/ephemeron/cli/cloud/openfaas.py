"""`ephemeron cloud deploy openfaas` and `ephemeron cloud remove openfaas`: creation and removal of the function on OpenFaaS."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ephemeron.errors import JobError

if TYPE_CHECKING:
    from ephemeron.functions.openfaas.settings import OpenFaasSettings

_STORE_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP")
"""Variables that locate an S3 store. None of them is a secret."""
_ENTRIES = ("EPHEMERON_ENTRIES",)


def _where(command: Any) -> Any:
    for option in (
        click.option("--openfaas-gateway", metavar="URL", help="Gateway of OpenFaaS.  [default: OPENFAAS_URL, or http://127.0.0.1:8080]"),
        click.option("--namespace", default="", metavar="NAME", help="Namespace of the function.  [default: the gateway's own]"),
        click.option("--function", default="ephemeron", show_default=True, metavar="NAME", help="Name of the function."),
    ):
        command = option(command)
    return command


def given(names: Sequence[str]) -> dict[str, str]:
    """Those of the variables that this environment has."""
    return {name: os.environ[name] for name in names if name in os.environ}


@click.command("openfaas")
@_where
@click.option("--channel", required=True, metavar="ADDRESS", help="Channel that the function uses: s3://… or redis://…")
@click.option("--out", type=click.Path(path_type=Path), default=Path("openfaas"), show_default=True, help="Folder for the recipe.")
@click.option("--image", metavar="NAME", help="Image, built and pushed by build.sh. Without it nothing is sent to the gateway.")
@click.option(
    "--memory-mb",
    metavar="MB[,MB…]",
    default="1769",
    show_default=True,
    help="Memory limits of replicas, one function for each; the first is for runs that name none. 60 MB are the handler's.",
)
@click.option("--cpus", type=float, default=0.0, help="CPU limit of a replica.  [default: one for 1,769 MB]")
@click.option(
    "--function-timeout-s", type=float, default=900.0, show_default=True, help="Time limit of a call; longer runs are handed off."
)
@click.option("--replicas", type=int, default=5, show_default=True, help="Replicas, at most; each worker needs one.")
@click.option("--inside", metavar="URL", help="Address of the gateway for functions.  [default: that of a standard installation]")
@click.option(
    "--s3-keys", is_flag=True, help="Give the function AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of this environment, as secrets."
)
@click.option("--contract-kit", is_flag=True, help="Include the entries of the platform contract in the recipe.")
def deploy_openfaas(
    openfaas_gateway: str | None,
    namespace: str,
    function: str,
    channel: str,
    out: Path,
    image: str | None,
    memory_mb: str,
    cpus: float,
    function_timeout_s: float,
    replicas: int,
    inside: str | None,
    s3_keys: bool,
    contract_kit: bool,
) -> None:
    """Write the function's image as a recipe, for review; with --image, also create or update the function.

    The password of the gateway is read from EPHEMERON_OPENFAAS_PASSWORD. A cache's password is taken from EPHEMERON_CHANNEL_PASSWORD
    into a secret of OpenFaaS, and nowhere else; its certificate authority, as text, from EPHEMERON_CHANNEL_CA.
    """
    from ephemeron.communication.channels import public_address
    from ephemeron.communication.channels.address import store_address
    from ephemeron.communication.channels.tls import for_functions
    from ephemeron.communication.direct.transport import listening_variables
    from ephemeron.errors import GatewayError
    from ephemeron.functions.async_invoke.sizes import parse_sizes
    from ephemeron.functions.openfaas import preflight
    from ephemeron.functions.openfaas.deploy import function as functions
    from ephemeron.functions.openfaas.deploy import recipe
    from ephemeron.functions.openfaas.gateway import refused
    from ephemeron.functions.openfaas.platform import LIMITS
    from ephemeron.functions.openfaas.preflight import functions_of, gateway_of_one
    from ephemeron.functions.openfaas.settings import INSIDE, check_url
    from ephemeron.functions.source_bundle import digest

    public, hidden = public_address(channel)
    if hidden:
        raise JobError("credentials do not belong in --channel", remedy="set EPHEMERON_CHANNEL_PASSWORD instead")
    settings, sizes = (_settings(openfaas_gateway, function, namespace), parse_sizes(memory_mb, low_mb=128, high_mb=LIMITS.memory_max_mb))
    check_url(inside or INSIDE, "--inside")
    store = store_address(public)
    preflight.check_channel(store, settings, {})
    wanted = functions.DeploymentSpec(
        image=image or "not yet built",
        memory_mb=sizes[0],
        lifetime_s=function_timeout_s,
        replicas=replicas,
        cpus=cpus,
        inside=(inside or INSIDE).rstrip("/"),
        secrets=tuple(secrets := _secrets(s3_keys)),
        digest=digest(),
        variables=given(_ENTRIES) | listening_variables(public) | (given(_STORE_VARIABLES) if store.startswith("s3:") else for_functions()),
    )
    specs = functions.specs_of(wanted, settings, sizes)
    for path in recipe.write_recipe(out, kit=contract_kit):
        click.echo(f"wrote {path}")
    values = out / "openfaas-values.yaml"
    values.write_text(functions.gateway_values(wanted))
    click.echo(f"wrote {values}")
    if image is None:
        click.echo(f"""
nothing was sent to {settings.gateway}. Read these files, then:
  {out}/build.sh REGISTRY/ephemeron:1
  helm upgrade openfaas openfaas/openfaas -n openfaas --reuse-values -f {values}
  ephemeron cloud deploy openfaas --openfaas-gateway {settings.gateway} --channel {public} --image REGISTRY/ephemeron:1""")
        return
    api = preflight.gateway_of(settings)
    try:
        for name, value in secrets.items():
            api.set_secret(name, value)
        before = functions_of(settings)
        done = {spec.service: gateway_of_one(settings, spec.service).deploy(spec) for spec in specs}
        for name in before:
            if name not in done:
                gateway_of_one(settings, name).delete()
                click.echo(f"deleted function {name} at {settings.gateway}, whose size is not wanted")
    except GatewayError as e:
        if e.status in (400, 404):  # about the deployment, not about what is deployed
            text = f"the gateway at {settings.gateway} refuses this function: {e.text or e.status}"
            raise JobError(text, remedy="see the message") from e
        raise refused(e, settings, doing="deploying") from e
    for spec in specs:
        click.echo(
            f"{done[spec.service]} function {spec.service} at {settings.gateway}: {spec.memory_mb} MB, {spec.cpus:g} CPUs, "
            f"calls of up to {function_timeout_s:g} s, up to {replicas} replicas"
        )
    if secrets:
        click.echo(f"with secrets {', '.join(secrets)}")
    click.echo(
        f"one replica {'of each ' if len(sizes) > 1 else ''}stays up and holds its memory; `ephemeron cloud remove openfaas` removes everything"
    )
    click.echo(
        f"train with: ephemeron train JOB --platform openfaas --openfaas-gateway {settings.gateway} --channel {public} --workers "
        f"{max(1, min(4, replicas - 1))}"
    )


@click.command("openfaas")
@_where
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def remove_openfaas(openfaas_gateway: str | None, namespace: str, function: str, yes: bool) -> None:
    """Delete the functions of all sizes and their secrets, and list what is not deleted."""
    from ephemeron.errors import GatewayError
    from ephemeron.functions.openfaas import preflight
    from ephemeron.functions.openfaas.gateway import refused
    from ephemeron.functions.openfaas.handler import SECRETS
    from ephemeron.functions.openfaas.preflight import functions_of, gateway_of_one

    settings = _settings(openfaas_gateway, function, namespace)
    if not yes:
        click.confirm(f"delete function {function} at {settings.gateway}, in all its sizes, and its secrets?", abort=True)
    api = preflight.gateway_of(settings)
    try:
        names = functions_of(settings) or [function]
    except GatewayError as e:
        raise refused(e, settings, doing="asking about") from e
    for name in names:
        _delete(f"function {name}", settings, gateway_of_one(settings, name).delete)
    for name in SECRETS:
        _delete(f"secret {name}", settings, partial(api.delete_secret, name), silent=True)
    click.echo("not touched: the image in its registry, objects of runs in the store (ephemeron runs clean --all)")


def _delete(what: str, settings: OpenFaasSettings, request: Callable[[], None], *, silent: bool = False) -> None:
    from ephemeron.errors import GatewayError
    from ephemeron.functions.openfaas.gateway import refused

    try:
        request()
        click.echo(f"deleted {what}")
    except GatewayError as e:
        if e.status != 404:
            raise refused(e, settings, doing=f"deleting {what} for") from e
        if not silent:
            click.echo(f"there is no {what}")


def _settings(gateway: str | None, function: str, namespace: str) -> OpenFaasSettings:
    from ephemeron.functions.openfaas.settings import OpenFaasSettings

    return OpenFaasSettings(gateway=gateway or "", function=function, namespace=namespace).located()


def _secrets(s3_keys: bool) -> dict[str, str]:
    """Values of the secrets to create, by name."""
    from ephemeron.functions.openfaas.handler import SECRETS

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
