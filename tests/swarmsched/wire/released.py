"""What the last released version knows of messages and stored values, as two files beside this one tell it.

`released.json` has the layout of every class: names of fields in order, and what each may be.  Decoders made from it
read as that version reads.  `golden.txt` has samples as that version wrote them.  Both are made by this file, run in a
checkout of a version on the day of its release, and never otherwise:

    python -m tests.swarmsched.wire.released
"""

import json
import random
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, inspect

from swarmsched.card import JobCard
from swarmsched.gossip.exchange import DATAGRAM_CODEC
from swarmsched.gossip.location import _Wire
from swarmsched.gossip.message import MEMBERSHIP_CODEC
from swarmsched.gossip.record import NodeRecord
from swarmsched.gossip.setting import SwarmSetting
from swarmsched.jobs.acceptor import Slot
from swarmsched.ledger.booking import Booking, StoredFence
from swarmsched.negotiation.owner import StoredTask
from swarmsched.node.protocol import PEER_CODEC
from swarmsched.wire.codec import encode_value

HERE = Path(__file__).parent
STORED: dict[str, type] = {
    cls.__name__: cls
    for cls in (Slot, Booking, StoredFence, StoredTask, NodeRecord, JobCard, _Wire, SwarmSetting)
}  # fmt: skip
CODECS = {"membership": MEMBERSHIP_CODEC, "datagram": DATAGRAM_CODEC, "peer": PEER_CODEC}
TRIES = 60  # a rich sample is the shortest of so many

Layout = dict[str, Any]


def readers() -> Iterator[tuple[str, type]]:
    """Each class that is a message or stored by itself, by codec and kind number or by its name."""
    for codec_name, codec in CODECS.items():
        yield from ((f"{codec_name} {kind}", cls) for kind, cls in sorted(codec.kinds.items()))
    yield from STORED.items()


def layout() -> Layout:
    """All classes that travel or are stored, and those in them."""
    structs: dict[str, list[Any]] = {}
    enums: dict[str, list[Any]] = {}
    roots = {name: _described(inspect.type_info(cls), structs, enums)["struct"] for name, cls in readers()}
    return {"roots": roots, "enums": enums, "structs": structs}


def _described(info: inspect.Type, structs: dict[str, list[Any]], enums: dict[str, list[Any]]) -> Any:
    """A type as JSON; structs and enumerations by their names."""
    described = partial(_described, structs=structs, enums=enums)
    match info:
        case inspect.StructType(cls=cls, fields=fields):
            if (name := _name(cls)) not in structs:
                structs[name] = []
                structs[name] += [[each.name, described(each.type), each.required] for each in fields]
            return {"struct": name}
        case inspect.EnumType(cls=cls):
            enums[_name(cls)] = [each.value for each in cls]
            return {"enum": _name(cls)}
        case inspect.UnionType(types=types):
            return {"union": [described(each) for each in types]}
        case inspect.VarTupleType(item_type=item):
            return {"list": described(item), **_bounds(info)}
        case inspect.TupleType(item_types=items):
            return {"tuple": [described(each) for each in items]}
        case inspect.DictType(key_type=key, value_type=value):
            return {"map": [described(key), described(value)], **_bounds(info)}
        case inspect.CustomType() | inspect.AnyType():
            raise TypeError(f"{info} has no layout")
    return {"plain": type(info).__name__.removesuffix("Type").lower(), **_bounds(info)}


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"


def _bounds(info: inspect.Type) -> dict[str, Any]:
    names = ("ge", "le", "min_length", "max_length")
    return {name: getattr(info, name) for name in names if getattr(info, name, None) is not None}


PLAIN = {"int": int, "float": float, "str": str, "bytes": bytes, "bool": bool, "none": None}


class Released:
    """Classes as that version declares them, by codec and kind number or by name."""

    def __init__(self, given: Layout) -> None:
        self._given, self._made = given, dict[str, type]()
        self._enums = {
            name: Enum(name, [(f"value_{number}", value) for number, value in enumerate(values)])
            for name, values in given["enums"].items()
        }
        self.classes: Mapping[str, type] = {key: self._struct(name) for key, name in given["roots"].items()}

    def _struct(self, name: str) -> type:
        if name not in self._made:
            fields = self._given["structs"][name]
            typed = [(each, self._type(kind), *(() if required else (None,))) for each, kind, required in fields]
            self._made[name] = msgspec.defstruct(name.rpartition(".")[2], typed, array_like=True, frozen=True)
        return self._made[name]

    def _type(self, kind: dict[str, Any]) -> Any:
        match kind:
            case {"struct": name}:
                return self._struct(name)
            case {"enum": name}:
                return self._enums[name]
            case {"union": kinds}:
                result = self._type(kinds[0])
                for each in kinds[1:]:
                    result = result | self._type(each)
                return result
            case {"tuple": kinds}:
                return tuple[*map(self._type, kinds)]  # type: ignore[misc]
            case {"list": item, **bounds}:
                return self._bounded(tuple[self._type(item), ...], bounds)  # type: ignore[misc]
            case {"map": [key, value], **bounds}:
                return self._bounded(dict[self._type(key), self._type(value)], bounds)  # type: ignore[misc]
            case {"plain": name, **bounds}:
                return self._bounded(PLAIN[name], bounds)
        raise TypeError(kind)

    @staticmethod
    def _bounded(kind: Any, bounds: dict[str, Any]) -> Any:
        return Annotated[kind, Meta(**bounds)] if bounds else kind


def sample(info: inspect.Type, rng: random.Random, *, is_least: bool = False) -> Any:
    """A value of a type, within its bounds; the least one has nothing that may be left out."""
    draw = partial(sample, rng=rng, is_least=is_least)
    match info:
        case inspect.StructType(cls=cls, fields=fields):
            return cls(**{each.name: draw(each.type) for each in fields})
        case inspect.EnumType(cls=cls):
            return next(iter(cls)) if is_least else rng.choice(list(cls))
        case inspect.UnionType(types=types):
            absent = [each for each in types if isinstance(each, inspect.NoneType)]
            return None if is_least and absent else draw(rng.choice([each for each in types if each not in absent]))
        case inspect.VarTupleType(item_type=item):
            return tuple(draw(item) for _ in range(_length(info, rng, is_least=is_least, most=2)))
        case inspect.TupleType(item_types=items):
            return tuple(map(draw, items))
        case inspect.DictType(key_type=key, value_type=value):
            return {draw(key): draw(value) for _ in range(_length(info, rng, is_least=is_least, most=2))}
        case inspect.StrType():
            return "".join(rng.choices("abxyz019-é", k=_length(info, rng, is_least=is_least, most=9)))
        case inspect.BytesType():
            return rng.randbytes(_length(info, rng, is_least=is_least, most=9))
        case inspect.BoolType():
            return not is_least and rng.random() < 0.5
        case inspect.IntType(ge=ge, le=le):
            low, high = ge if ge is not None else -(2**63), le if le is not None else 2**64 - 1
            return max(low, min(high, 0)) if is_least else rng.choice((low, high, rng.randint(low, min(high, 2**32))))
        case inspect.FloatType(ge=ge, le=le):
            return 0.0 if is_least else rng.choice((float(ge or 0.0), float(le or 1.5), rng.random()))
    return None


def _length(info: Any, rng: random.Random, *, is_least: bool, most: int) -> int:
    least = info.min_length or 0
    return least if is_least else rng.randint(max(1, least), min(most, info.max_length or most))


def encoded(name: str, cls: type, value: object) -> bytes:
    """The bytes of a value under the codec that its name tells, or as it is stored."""
    codec = CODECS.get(name.partition(" ")[0])
    return codec.encode(value) if codec else encode_value(cls, value)


def golden() -> Iterator[str]:
    """A line for each sample: what reads it, and its bytes."""
    rng = random.Random(1)
    for name, cls in readers():
        info = inspect.type_info(cls)
        yield f"{name}: {encoded(name, cls, sample(info, rng, is_least=True)).hex()}"
        for _ in range(2):
            tries = (encoded(name, cls, sample(info, rng)) for _ in range(TRIES))
            yield f"{name}: {sorted(tries, key=len)[TRIES // 3].hex()}"


if __name__ == "__main__":
    (HERE / "released.json").write_text(json.dumps(layout(), separators=(",", ":")).replace("],[", "],\n[") + "\n")
    (HERE / "golden.txt").write_text("".join(f"{line}\n" for line in golden()))
