"""JSON Schema of the specification of a job, made from the table of its fields."""

from swarm_agent.http.schema import FLAG, NUMBER, TEXT, Schema, array, at_most, between, choice, maybe, record
from swarmsched.api import VARIABLE_NAME_LIMIT, WORK_COUNTS, WORK_LIMITS, WORK_NEEDED
from swarmsched.fields import LONG_TEXT_LIMIT
from swarmsched.resources import LABEL_LENGTH
from swarmsched.specification import BATCH_LIMIT, FIELDS, GROUP_KEYS, SpecField

NAME_LENGTH = next(row.high for row in FIELDS if row.key == "group")
FIGURES = {
    name: between("integer" if name in WORK_COUNTS else "number", int(name in WORK_NEEDED), most)
    for name, most in WORK_LIMITS.items()
}
ASKED_WORK = record(
    {name: FIGURES[name] for name in WORK_NEEDED},
    optional={name: schema for name, schema in FIGURES.items() if name not in WORK_NEEDED},
    is_closed=True,
)
SHOWN: dict[str, Schema] = {
    **dict.fromkeys(("words", "nodes", "labels"), array(TEXT)),
    "whole": {"type": "integer"},
    "bytes": {"type": "integer"},
    **dict.fromkeys(("seconds", "moment"), NUMBER),
    "flag": FLAG,
    "variables": {"type": "object", "additionalProperties": TEXT},
    "gpu_limits": {"type": "object", "additionalProperties": {"type": "integer"}},
    "work": maybe(record(dict.fromkeys(WORK_LIMITS, NUMBER))),
}
"""By the kind of a field; of all others text."""
SHOWN["groups"] = array(
    record({"name": TEXT} | {row.key: SHOWN.get(row.kind, TEXT) for row in FIELDS if row.key in GROUP_KEYS})
)


def asked_spec() -> Schema:
    """What a client sends."""
    properties = {row.key: _asked(row) for row in FIELDS}
    required = {"command": {**properties.pop("command"), "minItems": 1}}
    return record(required, optional=properties, is_closed=True)


def shown_spec() -> Schema:
    """What answers have."""
    return record({row.key: SHOWN.get(row.kind, TEXT) for row in FIELDS})


def _asked(row: SpecField) -> Schema:
    if row.choices:
        return choice(*row.choices)
    schema = SHOWN.get(row.kind, TEXT)
    match row.kind:
        case "whole" | "bytes" | "seconds" | "moment":
            return between(schema["type"], row.low, row.high)
        case "flag":
            return schema
        case "labels":
            return array(at_most(LABEL_LENGTH), row.high)
        case "words" | "nodes":
            return array(at_most(LONG_TEXT_LIMIT if row.kind == "words" else 63), row.high)
        case "variables":
            names = {"propertyNames": {"maxLength": VARIABLE_NAME_LIMIT}}
            return {**schema, **names, "additionalProperties": at_most(LONG_TEXT_LIMIT), "maxProperties": row.high}
        case "gpu_limits":
            return {**schema, "additionalProperties": between("integer", 1, BATCH_LIMIT), "maxProperties": row.high}
        case "work":
            return maybe(ASKED_WORK)
        case "groups":
            own = {each.key: _asked(each) for each in FIELDS if each.key in GROUP_KEYS}
            command = {**own.pop("command"), "minItems": 1}
            group = record({"name": at_most(NAME_LENGTH), "command": command}, optional=own, is_closed=True)
            return array(group, row.high)
    return at_most(row.high)
