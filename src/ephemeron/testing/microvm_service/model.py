"""The service model of botocore, used from the other side: requests in, checked parameters out, checked answers back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from ephemeron.communication.rpc.http import HttpRequest, Response, json_response

SERVICE = "lambda-microvms"
_NOT_BLANK = r"[^\s]+"
_FIELD = re.compile(r"\{(\w+)\}")
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "long": int,
    "boolean": bool,
    "timestamp": (int, float),
    "structure": dict,
    "list": list,
    "map": dict,
    "double": (int, float),
    "float": (int, float),
}


class ServiceError(Exception):
    """An error of the service, by its name in the model."""

    def __init__(self, code: str, text: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(text)
        self.code, self.text, self.retry_after_s = code, text, retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A request that fits an operation of the model."""

    name: str
    parameters: Mapping[str, Any]


class WireModel:
    """Operations, shapes and errors of the service."""

    def __init__(self) -> None:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel

        self._model = ServiceModel(Loader().load_service_model(SERVICE, "service-2"), SERVICE)
        self._routes = []
        for name in self._model.operation_names:
            http = self._model.operation_model(name).http
            pattern = _FIELD.sub(r"(?P<\1>[^/]+)", re.escape(http["requestUri"]).replace(r"\{", "{").replace(r"\}", "}"))
            self._routes.append((http["method"], re.compile(pattern), name))

    def parse(self, request: HttpRequest) -> Operation:
        """The operation and its checked parameters.

        Raises:
            ServiceError: there is none, or a parameter is not as the model says.
        """
        # `HttpRequest.path` is unquoted; an ARN in a path has slashes of its own only where the model has them.
        for method, pattern, name in self._routes:
            found = pattern.fullmatch(request.path) if method == request.method else None
            if found is not None:
                return Operation(name=name, parameters=self._parameters(name, request, found.groupdict()))
        raise ServiceError("ValidationException", f"no operation {request.method} {request.path}")

    def answer(self, name: str, value: Mapping[str, Any]) -> Response:
        """A checked answer.

        Raises:
            AssertionError: it is not as the model says: a mistake of the emulator.
        """
        operation = self._model.operation_model(name)
        problem = "" if operation.output_shape is None else _problem(operation.output_shape, value, "answer")
        assert not problem, f"{name}: {problem}"
        return json_response(dict(value), status=int(operation.http.get("responseCode", 200)))

    def refusal(self, error: ServiceError) -> Response:
        """An error as the service sends it."""
        shape = self._model.shape_for(error.code)
        headers = {"x-amzn-errortype": error.code}
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(error.retry_after_s)
        status = int(shape.metadata["error"]["httpStatusCode"])
        return json_response({"message": error.text}, status=status, headers=headers)

    def _parameters(self, name: str, request: HttpRequest, path: Mapping[str, str]) -> Mapping[str, Any]:
        shape = self._model.operation_model(name).input_shape
        try:
            out = request.json()
        except ValueError as e:
            raise ServiceError("ValidationException", f"the body is no JSON: {e}") from None
        query = dict(parse_qsl(request.query))
        for member, inner in shape.members.items():
            known = inner.serialization.get("name", member)
            if inner.serialization.get("location") == "uri" and known in path:
                out[member] = path[known]
            elif inner.serialization.get("location") == "querystring" and known in query:
                out[member] = int(query[known]) if inner.type_name == "integer" else query[known]
        if problem := _problem(shape, out, "request"):
            raise ServiceError("ValidationException", problem)
        return out


def _problem(shape: Any, given: object, where: str) -> str:
    """Why a value is not of a shape; empty: it is."""
    value: Any = given
    kind, limits = shape.type_name, shape.metadata
    if not isinstance(given, _TYPES[kind]) or (isinstance(given, bool) and kind != "boolean"):
        return f"{where}: {value!r} is no {kind}"
    size = value if kind in ("integer", "long", "double", "float") else len(value) if hasattr(value, "__len__") else None
    if size is not None and not limits.get("min", size) <= size <= limits.get("max", size):
        return f"{where}: {size} is not within {limits.get('min', '')} and {limits.get('max', '')}"
    if kind == "string":
        if limits.get("enum") and value not in limits["enum"]:
            return f"{where}: {value!r} is none of {', '.join(limits['enum'])}"
        pattern = limits.get("pattern", "")
        # Patterns hold for all of a value, but for the one that means "not blank".
        fits = re.search if pattern == _NOT_BLANK else re.fullmatch
        if pattern and "\\p{" not in pattern and not fits(pattern, value):
            return f"{where}: {value!r} does not match {limits['pattern']}"
    if kind == "structure":
        missing = [name for name in limits.get("required", ()) if name not in value]
        if missing:
            return f"{where}: {', '.join(missing)} is missing"
        if limits.get("union") and len(value) != 1:
            return f"{where}: exactly one member of a union is set"
        inner = {name: shape.members.get(name) for name in value}
        unknown = [name for name, member in inner.items() if member is None]
        if unknown:
            return f"{where}: {', '.join(unknown)} is unknown"
        return _first(_problem(inner[name], value[name], f"{where}.{name}") for name in value)
    if kind == "list":
        return _first(_problem(shape.member, item, f"{where}[{n}]") for n, item in enumerate(value))
    if kind == "map":
        return _first(_problem(shape.value, item, f"{where}[{key}]") for key, item in value.items())
    return ""


def _first(problems: Any) -> str:
    return next(filter(None, problems), "")


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two requests ask for the same."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
