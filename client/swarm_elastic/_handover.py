"""What a rank that joins, or is a step behind, is given by those that are ahead.

Weights, buffers and the optimizer's tensors go as they lie in memory, in pieces that all holders share in sending.  All
else is small and goes before them as one document, which is read without running anything that it might contain.
"""

from __future__ import annotations

import copy
import hashlib
import io
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from swarm_elastic._arguments import OWN_PARTS
from swarm_elastic._group import Group

PIECE_BYTES = 8 << 20
WINDOW = 64  # pieces that are under way at once, since those of a GPU are copied to main memory before they go
BUFFER_MOST = 1 << 16  # numbers in a buffer that is put back where a step is done again
SMALL_BYTES = 1 << 12  # what is not larger travels in the document
PLACE = "swarm_elastic.tensor"
COPIES = "copies of buffers in "  # begins the name of an item
Stateful = Any  # has state_dict() and load_state_dict()


class TrainingState:
    """The parts of a training whose state is passed on; `parts` are scheduler, scaler and the like, by name."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, parts: Mapping[str, Stateful]) -> None:
        self._model, self._optimizer, self._parts = model, optimizer, parts
        self._names = {id(each): name for name, each in model.named_parameters()}
        self._moved = Moved(model, [*self._noted().values()])
        self.device = next((each.device for each in self._named().values()), torch.device("cpu"))

    def layout(self, extra: object) -> str:
        """A hash that is the same where the same can be loaded."""
        lines = [f"{name} {tuple(each.shape)} {each.stride()} {each.dtype}" for name, each in self._named().items()]
        groups = [len(group["params"]) for group in self._optimizer.param_groups]
        lines += [type(self._optimizer).__name__, repr(groups), repr(sorted(self._parts)), repr(extra)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:15]

    def document(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """All that is small, and the large tensors in the order in which they travel."""
        large: list[torch.Tensor] = []

        def packed(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if value.device != self.device or value.numel() * value.element_size() <= SMALL_BYTES:
                    return value.detach().cpu()
                dense = value.detach() if is_dense(value) else value.detach().contiguous()
                large.append(dense)
                return (PLACE, len(large) - 1, tuple(dense.shape), dense.stride(), str(dense.dtype))
            return _mapped(value, packed)

        small = {
            "model": packed(self._named()),
            "optimizer": packed(plain(self._optimizer.state_dict())),
            "parts": {name: packed(plain(part.state_dict())) for name, part in self._parts.items()},
            "extra": {name: packed(state) for name, state in self._extra().items()},
            "random": random_states(),
        }
        return small, large

    def places(self, small: dict[str, Any], *, is_kept: bool) -> list[torch.Tensor]:
        """Tensors to receive the large ones into; beside the present weights if these must be kept until all came."""
        shapes: dict[int, tuple[Any, ...]] = {}

        def noted(value: Any) -> Any:
            if isinstance(value, tuple) and value[:1] == (PLACE,):
                shapes[value[1]] = value
            return _mapped(value, noted)

        noted(small)
        own: dict[int, torch.Tensor] = {}
        named = self._named()
        for name, place in small["model"].items():
            if isinstance(place, tuple) and not is_kept and named[name].stride() == place[3]:
                own[place[1]] = named[name]
        return [own[index] if index in own else _empty(shapes[index], self.device) for index in sorted(shapes)]

    def load(self, small: dict[str, Any], large: Sequence[torch.Tensor], *, is_new: bool) -> None:
        """Take over what was received; random states only where this rank has not drawn numbers of this training."""

        def unpacked(value: Any) -> Any:
            if isinstance(value, tuple) and value[:1] == (PLACE,):
                return large[value[1]]
            return _mapped(value, unpacked)

        named = self._named()
        for name, value in unpacked(small["model"]).items():
            if value.data_ptr() != named[name].data_ptr():
                named[name].copy_(value)
        self._optimizer.load_state_dict(unpacked(small["optimizer"]))
        for name, part in self._parts.items():
            part.load_state_dict(unpacked(small["parts"][name]))
        noted = self._noted()
        for name, state in unpacked(small.get("extra", {})).items():
            noted[name].load_state_dict(state)
        if is_new:
            set_random_states(small["random"])

    def _named(self) -> dict[str, torch.Tensor]:
        """Weights and buffers, detached: they share the memory, and nothing of autograd is saved with them."""
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: each.detach() for name, each in named}

    def _noted(self) -> dict[str, Noted]:
        """Modules that hold more than weights and buffers, by their names."""
        modules = self._model.named_modules()
        plainest = torch.nn.Module.get_extra_state
        return {name: Noted(module) for name, module in modules if type(module).get_extra_state is not plainest}

    def _extra(self) -> dict[str, Any]:
        return {name: plain(module.state_dict()) for name, module in self._noted().items()}

    def compared(self) -> Iterator[tuple[str, Any]]:
        """What is the same on all ranks that train together, by its name."""
        for name, weight in self._model.named_parameters():
            yield f"weight {name}", weight
        held = self._optimizer.state_dict()["state"]
        order = [self._names.get(id(each), "") for group in self._optimizer.param_groups for each in group["params"]]
        for at, name in enumerate(order):
            yield f"optimizer state of {name}", held.get(at, {})
        buffers = {_last(name) for name, _ in self._model.named_buffers()}
        for name, part in self._parts.items():
            if name != "noise" and not getattr(part, "is_of_rank", False):
                told = name if name in OWN_PARTS else f"parts[{name!r}]"
                copies: list[Any] = []
                yield told, _without(plain(part.state_dict()), buffers, copies)
                yield f"{COPIES}{told}", copies

    def small(self) -> list[Any]:
        """What is kept: rates, and the state of parts."""
        parts = [*self._parts.values(), *self._noted().values()]
        return [*map(hyperparameters, self._optimizer.param_groups), *(plain(part.state_dict()) for part in parts)]

    def moved_by_passes(self) -> Iterator[tuple[str, Any]]:
        """What may be each rank's own, since passes may change it."""
        for name, buffer in self._model.named_buffers():
            yield f"buffer {name}", buffer
        for name, state in self._extra().items():
            yield f"extra state of {name}", state

    def keep(self) -> Kept:
        """A copy of what a script may change beside weights; `restore` puts it back."""
        return Kept(self._optimizer, [*self._parts.values(), *self._noted().values()])

    def begin_step(self) -> None:
        """Note what the passes of a step move: random numbers, extra state, and buffers that are small."""
        self._moved.note()

    def undo_step(self) -> dict[str, Any]:
        """Put that back, for a step that is done again; what random numbers were since."""
        return self._moved.undo()

    def versions(self) -> dict[str, int]:
        """By which a change of weights and of what the optimizer keeps of them is seen."""
        found = {f"weight {name}": each._version for name, each in self._model.named_parameters()}  # noqa: SLF001
        for parameter, held in self._optimizer.state.items():
            for key, each in held.items() if isinstance(held, dict) else ():
                if isinstance(each, torch.Tensor):
                    found[f"{key} of {self._names.get(id(parameter), '')}"] = each._version  # noqa: SLF001
        return found

    def full(self) -> dict[str, Any]:
        """All of it in one piece, for a file."""
        parts = {name: plain(part.state_dict()) for name, part in self._parts.items()}
        optimizer, states = plain(self._optimizer.state_dict()), random_states()
        small = {"optimizer": optimizer, "parts": parts, "extra": self._extra(), "random": states}
        return {"model": self._named(), "kinds": self._kinds, **small}

    def check(self) -> None:
        """Raises TypeError that names what nobody could read again: a checkpoint with it would be of no use."""
        small, _ = self.document()
        parts = small.pop("parts")
        for name, part in (*small.items(), *parts.items()):
            found = _unreadable(part, name)
            if found:
                problem = f"{found}, could be read neither from a checkpoint nor by a newcomer"
                raise TypeError(
                    f"{problem}; have state_dict() give numbers, text, tensors, and lists and dicts of them"
                )

    def load_full(self, state: dict[str, Any]) -> None:
        """Take over what `full` gave."""
        self.load(state, [], is_new=True)

    def difference(self, state: Mapping[str, Any]) -> str:
        """Why what `full` gave is of another training; nothing where it can be taken over."""
        kinds = state.get("kinds", self._kinds)  # files of the first versions have none
        for own, found in ((_shapes(self._named()), _shapes(state.get("model"))), (self._kinds, kinds)):
            for name in {**own, **found}:
                there, here = found.get(name, "not there"), own.get(name, "not there")
                if there != here:
                    return f"{name} is {there} in it, and {here} in the script"
        return ""

    @property
    def _kinds(self) -> dict[str, str]:
        """The classes whose state means nothing to others; of a script's own parts only that they are there."""
        own = {name: type(part).__name__ for name, part in self._parts.items() if name in OWN_PARTS}
        rest = {f"parts[{name!r}]": "there" for name in self._parts if name not in OWN_PARTS}
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        return {"optimizer": f"{type(self._optimizer).__name__} of {sizes} parameters", **own, **rest}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _without(state: Any, buffers: Collection[str], copies: list[Any]) -> Any:
    """The state of a part without copies of buffers, as averages of a model or a piece of it, and teachers, have them.

    Those are added to `copies`; `buffers` are the last words of their names.
    """
    if isinstance(state, (list, tuple)):
        return [_without(each, buffers, copies) for each in state]
    if not isinstance(state, dict):
        return state
    rest = {}
    for key, each in state.items():
        if isinstance(each, torch.Tensor) and _last(str(key)) in buffers:
            copies.append([str(key), each])
        else:
            rest[key] = _without(each, buffers, copies)
    return rest


class Noted:
    """What a module holds beside weights and buffers, as a part."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def state_dict(self) -> Any:
        return self._module.get_extra_state()

    def load_state_dict(self, state: Any) -> None:
        self._module.set_extra_state(state)


class Kept:
    """A copy of rates and of the state of parts."""

    def __init__(self, optimizer: torch.optim.Optimizer, parts: Sequence[Stateful]) -> None:
        self._optimizer, self._parts = optimizer, parts
        groups = [hyperparameters(group) for group in optimizer.param_groups]
        self._groups, self._states = copy.deepcopy((groups, [part.state_dict() for part in parts]))

    def restore(self) -> None:
        """Put it back, once."""
        for index, state in enumerate(self._states):
            self._parts[index].load_state_dict(state)
        for index, values in enumerate(self._groups):
            self._optimizer.param_groups[index].update(values)


class Moved:
    """What passes move beside gradients, as it was before a step."""

    def __init__(self, model: torch.nn.Module, noted: Sequence[Noted]) -> None:
        self._noted, self._states = noted, list[Any]()
        self._places = [(module._buffers, name) for module in model.modules() for name in module._buffers]  # noqa: SLF001
        self._held: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._random: dict[str, Any] = {}

    def note(self) -> None:
        """Before the first pass."""
        self._states = [copy.deepcopy(each.state_dict()) for each in self._noted]
        self._random, held = random_states(), self._small()
        with torch.no_grad():
            if [id(each) for each in held] != [id(each) for each in self._held]:
                self._held, self._copies = held, [each.clone() for each in held]
            elif held:
                torch._foreach_copy_(self._copies, held)

    def undo(self) -> dict[str, Any]:
        """After a step that came to nothing; what random numbers were since."""
        since = random_states()
        if self._random:
            set_random_states(self._random)
        for at, state in enumerate(self._states):
            self._noted[at].load_state_dict(copy.deepcopy(state))
        with torch.no_grad():
            for at, each in enumerate(self._small()[: len(self._copies)]):
                if each.shape == self._copies[at].shape:
                    each.copy_(self._copies[at])
        return since

    def _small(self) -> list[torch.Tensor]:
        held = [buffers.get(name) for buffers, name in self._places]
        return [each for each in held if each is not None and each.numel() <= BUFFER_MOST]


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """All that a group of parameters has beside these."""
    return {name: value for name, value in group.items() if name != "params"}


def send_document(group: Group, document: dict[str, Any], behind: Sequence[int]) -> None:
    """To all who are behind, by one rank alone."""
    stream = io.BytesIO()
    torch.save(document, stream)
    data = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
    works = [group.send(each, rank) for rank in behind for each in (torch.tensor([len(data)]), data)]
    group.finish(works)


def receive_document(group: Group, source: int) -> dict[str, Any]:
    """The other side."""
    length = torch.zeros(1, dtype=torch.int64)
    group.finish([group.receive(length, source)])
    data = torch.empty(int(length), dtype=torch.uint8)
    group.finish([group.receive(data, source)])
    document: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return document


def send_tensors(group: Group, tensors: Sequence[torch.Tensor], holders: Sequence[int], behind: Sequence[int]) -> None:
    """This holder's share of the pieces."""
    for window in _windows(tensors):
        group.finish(
            [
                group.send(piece, receiver)
                for number, piece in window
                for turn, receiver in enumerate(behind)
                if holders[(number + turn) % len(holders)] == group.rank
            ]
        )


def receive_tensors(
    group: Group, tensors: Sequence[torch.Tensor], holders: Sequence[int], behind: Sequence[int]
) -> None:
    """All pieces, from whichever holder sends them."""
    turn = behind.index(group.rank)
    for window in _windows(tensors):
        group.finish([group.receive(piece, holders[(number + turn) % len(holders)]) for number, piece in window])


def _windows(tensors: Sequence[torch.Tensor]) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """The pieces with their numbers, some at a time."""
    numbered = enumerate(_pieces(tensors))
    while window := list(islice(numbered, WINDOW)):
        yield window


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The memory of the tensors, cut up; the same on both sides."""
    for tensor in tensors:
        flat = tensor.as_strided((tensor.numel(),), (1,))
        yield from flat.split(max(1, PIECE_BYTES // tensor.element_size()))


def _shapes(named: Any) -> dict[str, str]:
    """Type and shape of tensors by name; nothing where it is none of that."""
    named = named if isinstance(named, dict) else {}
    return {name: f"{each.dtype} {tuple(each.shape)}" for name, each in named.items() if isinstance(each, torch.Tensor)}


def _mapped(value: Any, function: Any) -> Any:
    """The same containers with the function's results for what is in them."""
    if type(value) is dict:
        return {key: function(each) for key, each in value.items()}
    return type(value)(function(each) for each in value) if type(value) in (list, tuple) else value


def plain(value: Any) -> Any:
    """The same with Python's own numbers for those of numpy, which nobody may read without running what they name."""
    if type(value) in (dict, OrderedDict, Counter):
        copied = copy.copy(value)  # with what a module's state has beside its items
        copied.clear()
        copied.update({plain(key): plain(each) for key, each in value.items()})
        return copied
    is_number = not isinstance(value, torch.Tensor) and getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_number else _mapped(value, plain)


def _unreadable(value: Any, name: str) -> str:
    """The innermost part that is not read back as others read it, with its type; nothing where all is."""
    if _is_readable(value):
        return ""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, each in inner:
        found = _unreadable(each, f"{name}[{key!r}]")
        if found:
            return found
    return f"{name}, a {type(value).__module__}.{type(value).__qualname__}"


def _is_readable(value: Any) -> bool:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception:  # noqa: BLE001  # whatever the objects of a script may raise
        return False
    return True


def is_dense(tensor: torch.Tensor) -> bool:
    """True where its memory is one piece with each element in it once."""
    pairs = [(size, tensor.stride(axis)) for axis, size in enumerate(tensor.shape)]
    strides = [(size - 1) * stride for size, stride in pairs]
    return 0 not in tensor.stride() and 1 + sum(strides) == tensor.numel()


def _empty(place: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    _, _, shape, stride, dtype = place
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype.partition(".")[2]), device=device)


def random_states() -> dict[str, Any]:
    """Of all that draw."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, keys.tolist(), *rest)
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """The other way."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
