"""The OpenAPI 3.1 document of the routes, from the same table and the same schemas that serve them."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

import diptych
from diptych.server.routes import RouteSpec

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS = {
    "400": "The request is wrong; the error names the field.",
    "401": "The API key is missing or wrong.",
    "404": "No such model or path.",
    "413": "The body is too large.",
    "503": "Starting, shutting down, or too busy: come back after Retry-After seconds.",
    "504": "The request's deadline passed.",
}


def openapi_document(routes: tuple[RouteSpec, ...], *, has_api_key: bool) -> dict[str, Any]:
    """The document. Args: has_api_key: whether requests need a bearer token."""
    bodies = sorted({route.body for route in routes if route.body is not None}, key=lambda body: body.__name__)
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    components: dict[str, Any] = {"schemas": {**schemas.get("$defs", {}), "Error": _ERROR_SCHEMA}}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Diptych", "version": diptych.__version__},
        "paths": {},
        "components": components,
    }
    if has_api_key:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"bearer": []}]
    for route in routes:
        path = route.path.replace(":path}", "}")
        document["paths"][path] = {method.lower(): _operation(route, path, method) for method in route.methods}
    return document


def _operation(route: RouteSpec, path: str, method: str) -> dict[str, Any]:
    summary = (route.handler.__doc__ or "").strip().split("\n")[0]
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}_{path.strip('/').replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": summary,
        "responses": {"200": _success(route), **{status: _failure(text) for status, text in _ERRORS.items()}},
    }
    parameters = [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string"}} for name in route.query
    ]
    if "{" in path:
        parameters.append({"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}})
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _success(route: RouteSpec) -> dict[str, Any]:
    response: dict[str, Any] = {"description": "Success."}
    if route.media_type is not None:
        response["content"] = {route.media_type: {"schema": {}}}
    if route.is_stream:
        response["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return response


def _failure(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
