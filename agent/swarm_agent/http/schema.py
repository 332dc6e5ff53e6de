"""What JSON Schemas (2020-12) are made of: types of values, and records and lists of them."""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
SECONDS: Schema = {"type": "number", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TIME: Schema = {"type": "string", "format": "date-time"}
VERSION: Schema = {"const": "v1"}
DIGEST: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
JOB_ID: Schema = {"type": "string", "pattern": "^[0-9a-hjkmnp-tv-z]{26}$"}


REFERENCE = "#/components/schemas/"


def ref(name: str) -> Schema:
    """A reference to another schema."""
    return {"$ref": f"{REFERENCE}{name}"}


def maybe(schema: Schema) -> Schema:
    """The schema or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def array(schema: Schema, most: int | None = None) -> Schema:
    """A list, of at most so many where there is a limit."""
    return {"type": "array", "items": schema, **({} if most is None else {"maxItems": most})}


def at_most(length: int) -> Schema:
    """Text of limited length."""
    return {"type": "string", "maxLength": length}


def between(kind: str, low: float, high: float) -> Schema:
    """A number within bounds, of the kind `integer` or `number`."""
    return {"type": kind, "minimum": low, "maximum": high}


def choice(*values: str) -> Schema:
    """One of a few words."""
    return {"enum": list(values)}


def record(properties: Schema, *, optional: Schema | None = None, is_closed: bool = False) -> Schema:
    """An object whose `properties` are all there; others may be added unless it is closed (what clients send)."""
    schema = {"type": "object", "properties": {**properties, **(optional or {})}, "required": list(properties)}
    return {**schema, "additionalProperties": False} if is_closed else schema
