"""What a script may give: refused where it comes in, by its name, its value and a remedy."""

from __future__ import annotations

import inspect
import math
import operator
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SHOWN_LENGTH = 60
STATE = ("state_dict", "load_state_dict")
OWN_PARTS = ("scheduler", "scaler", "noise")
TELL_STEPS = "call its step by yourself, with the same on all ranks, and name it in parts"


def shown(value: object) -> str:
    """A value in a few characters."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # integers of too many digits, and whatever the objects of a script may raise
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_LENGTH else text[:SHOWN_LENGTH] + "..."


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """A whole number, of numpy too, as one of Python.  Raises TypeError and ValueError."""
    if type(value) is int and least <= value and (most is None or value <= most):
        return value
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} is {shown(value)}; it must be a whole number, an int")
    if number < least or (most is not None and number > most):
        bounds = f"{least} or more" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} is {shown(number)}; it must be {bounds}")
    return number


def number(name: str, value: object) -> float:
    """A number of any kind; one that is too large for a float is infinite.  Raises TypeError."""
    found, shape = None, tuple(getattr(value, "shape", ()))
    if not isinstance(value, (bool, str, bytes, bytearray)) and math.prod(shape) == 1:
        try:
            found = float(value)  # type: ignore[arg-type]
        except OverflowError:
            return math.inf if value > 0 else -math.inf  # type: ignore[operator]
        except (TypeError, ValueError):
            pass
    if found is None:
        of = f" of shape {shape}; give its mean or sum" if shape else ""
        raise TypeError(f"{name} must be a number, not {type(value).__name__}{of}")
    return value if isinstance(value, int) else found


def bound(name: str, value: object) -> float | None:
    """A number above 0, or None for no bound.  Raises TypeError and ValueError."""
    found = None if value is None else number(name, value)
    if found is not None and not found > 0:
        raise ValueError(f"{name} is {shown(found)}; it must be above 0, or left out")
    return found


def one_of(name: str, value: object, known: Sequence[str]) -> str | None:
    """A word, or None.  Raises ValueError."""
    if value is not None and (not isinstance(value, str) or value not in known):
        raise ValueError(f"{name} is {shown(value)}; it must be one of {', '.join(known)}, or left out")
    return value


def seconds(name: str, value: object, least: float = -math.inf) -> float:
    """How long may be waited; no longer than threads can.  Raises TypeError and ValueError."""
    found = number(name, value)
    if math.isnan(found):
        raise ValueError(f"{name} is nan; it must be a number of seconds")
    if found < least:
        raise ValueError(f"{name} is {shown(found)}; it must be {least:g} seconds or more, or math.inf for no limit")
    return min(found, threading.TIMEOUT_MAX)


def check_objects(model: Any, optimizer: Any, scheduler: Any, scaler: Any, parts: Any, *, are_stepped: bool) -> None:
    """That they belong together, and can be stepped without arguments if they are.  Raises TypeError and ValueError."""
    _has("model", model, ("named_parameters", "named_buffers", *STATE), "give a torch.nn.Module")
    _has("optimizer", optimizer, ("step", *STATE), "give one of torch.optim, of the model's parameters")
    _takes_nothing("optimizer", optimizer, "take one whose step needs no closure")
    _check_parameters(model, optimizer)
    if scheduler is not None:
        _has("scheduler", scheduler, ("step", *STATE), "give one of torch.optim.lr_scheduler")
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError("scheduler is of another optimizer; make it of the one that is given")
    for each in _with_inner(scheduler) if are_stepped else ():
        _takes_nothing("scheduler", each, TELL_STEPS)
    if scaler is not None:
        _has("scaler", scaler, ("step", "update", "unscale_", "get_scale", *STATE), "give a torch.amp.GradScaler")
    _check_parts(parts)


def check_loader(dataset: Any) -> None:
    """Raises TypeError for what gives batches instead of samples."""
    if all(hasattr(dataset, name) for name in ("dataset", "batch_sampler", "collate_fn")):
        raise TypeError(
            f"dataset is of type {type(dataset).__name__}, whose batches would count as samples; give its dataset, a "
            "collate_fn, threads or processes to batches(), and the batch size to global_batch"
        )


def _has(name: str, value: Any, methods: Iterable[str], remedy: str) -> None:
    for each in methods:
        if not callable(getattr(value, each, None)):
            raise TypeError(f"{name} is of type {type(value).__name__}, which has no {each}(); {remedy}")


def _takes_nothing(name: str, value: Any, remedy: str) -> None:
    try:
        _, *parameters = inspect.signature(type(value).step).parameters.values()
    except (TypeError, ValueError):  # of C code
        return
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind in named]
    if needed:
        problem = f"{name} is of type {type(value).__name__}, whose step() needs {needed[0]}"
        raise ValueError(f"{problem}; {remedy}")


def _with_inner(scheduler: Any) -> list[Any]:
    return [] if scheduler is None else [scheduler, *getattr(scheduler, "_schedulers", ())]


def _check_parameters(model: Any, optimizer: Any) -> None:
    own = {id(each) for _, each in model.named_parameters()}
    groups = getattr(optimizer, "param_groups", ())
    foreign = [tuple(each.shape) for group in groups for each in group["params"] if id(each) not in own]
    if foreign:
        problem = f"optimizer has a parameter of shape {foreign[0]} that is none of the model's"
        raise ValueError(f"{problem}; put all that is trained into one module, and make the optimizer of that")


def _check_parts(parts: Any) -> None:
    if parts is None:
        return
    if not isinstance(parts, Mapping):
        raise TypeError(f"parts is {shown(parts)}; it must be a dict of objects by name")
    for name, each in parts.items():
        if not isinstance(name, str) or name in OWN_PARTS:
            raise ValueError(f"parts has the name {shown(name)}; it must be text, and none of {', '.join(OWN_PARTS)}")
        _has(f"parts[{name!r}]", each, STATE, "give what has both")
