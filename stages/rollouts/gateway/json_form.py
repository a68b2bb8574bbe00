"""Answers in a given JSON form: the APIs' ``response_format``, ``text.format`` and ``output_config.format``."""

import json
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from stages.rollouts.gateway.api import ApiError

_ANY_OBJECT = '{"type":"object"}'
_LIMIT = 500
"""Characters of what is wrong with a schema that are told."""


def schema_in(form: Any, param: str) -> str | None:
    """The JSON schema that an answer is to fit, as text with its keys in the order in which they came.

    Args:
        form: the field of the request; the schema lies in it, or under ``json_schema`` as in the chat API.
        param: how the API calls that field.

    Returns:
        None: an answer may be any text.

    Raises:
        ApiError: it is no such field, or its schema is none.
    """
    if form is None:
        return None
    match form.get("type") if isinstance(form, dict) else None:
        case "text":
            return None
        case "json_object":
            return _ANY_OBJECT
        case "json_schema":
            holder = form.get("json_schema", form)
            schema = holder.get("schema") if isinstance(holder, dict) else None
            return _checked(schema, param)
    raise ApiError(400, f"{param} must be an object of type text, json_object or json_schema", param=param)


def _checked(schema: Any, param: str) -> str:
    if not isinstance(schema, dict):
        raise _wrong(param, "a schema is an object")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise _wrong(param, f"{error.json_path}: {error.message}") from None
    except RecursionError:
        raise _wrong(param, "it is nested too deeply") from None
    return json.dumps(schema, ensure_ascii=False)


def _wrong(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param} has no JSON schema: {why[:_LIMIT]}", param=param, code="invalid_json_schema")
