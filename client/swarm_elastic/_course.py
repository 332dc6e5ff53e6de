"""Where a script is in its own loops, beside the steps: what a newcomer must not do again, and where it begins.

A newcomer is given the state of those that begin a step.  Its script comes to that step through code of its own: the
heads of loops, and in `for epoch in range(5)` whole epochs that are over.  What that code does to the state others have
done already, so it is undone when the script has come to where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from swarm_elastic._handover import TrainingState
from swarm_elastic._replicas import hashes

NOT_STARTED = -1


class Body(NamedTuple):
    """One turn of a loop over `epochs()`, the `loop`th of the script; `first` is its first epoch of the data."""

    loop: int
    number: int
    first: int
    is_entered: bool  # else it is the next one to begin


class Course:
    """Of one script: its loops over `epochs()`, and its calls of `batches()`."""

    def __init__(self) -> None:
        self.epochs = 0  # of all calls of `batches`
        self.passed = 0  # epochs of the data that the job has behind it, with all that the script does after them
        self._first = 0  # epoch of the present call
        self._is_out = True  # of the loop over its batches
        self._is_saved = False  # whether a checkpoint was taken since
        self._loops = 0
        self._body = Body(NOT_STARTED, 0, 0, False)

    def state(self) -> dict[str, Any]:
        """For newcomers and checkpoints.  Behind its batches a body is taken for over."""
        body = self._body
        if body.is_entered and self._is_out and self.epochs > body.first:
            body = Body(body.loop, body.number + 1, self.epochs, False)
        return {"passed": max(self.passed, self.epochs if self._is_out else self._first), "body": list(body)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there; those of the first versions have neither."""
        self.passed = state.get("passed", 0)
        self._body = max(self._body, Body(*state.get("body", self._body)))

    def begin_call(self, epochs: int) -> int:
        """Of `batches`; its first epoch."""
        if self._is_saved and self._body.is_entered:
            raise RuntimeError(
                "checkpoint() came between two calls of batches() in one epoch of epochs(): call it in the loop over "
                "batches, or at the end of the epoch"
            )
        self._first, self._is_out = self.epochs, False
        self.epochs += epochs
        return self._first

    def end_call(self) -> None:
        """The script has left the loop over its batches, at its end."""
        self._is_out = True

    def saved(self) -> None:
        """A checkpoint was taken."""
        self._is_saved = self._is_out

    def bodies(self, count: int, arrive: Callable[[], None], confirm: Callable[[], None]) -> Iterator[int]:
        """The turns of a loop from the present one on.

        `arrive` is called where it is known to be the one to begin, `confirm` behind each.
        """
        loop, begun = self._loops, self._body
        self._loops += 1
        if begun.loop > loop:
            return
        index = 0
        if begun.loop == loop:
            index, self.epochs = begun.number, begun.first
            if not begun.is_entered:
                arrive()
        while index < count:
            self._body, self._is_saved = Body(loop, index, self.epochs, True), False
            self._is_out = True
            yield index
            index += 1
            self._body, self._is_saved = Body(loop, index, self.epochs, False), False
            confirm()


class Arrival:
    """The state that was given to a newcomer, against its own script, until that has come to the present step."""

    def __init__(self, state: TrainingState) -> None:
        self._state, self._kept = state, state.keep()
        self._versions, self._hashes = state.versions(), self._found()
        state.begin_step()

    def _found(self) -> list[int]:
        return hashes(self._state.small())

    def restore(self) -> None:
        """Undo what was done since.  Raises RuntimeError where that cannot be undone."""
        now = self._state.versions()
        changed = [name for name, version in self._versions.items() if now.get(name, version) != version]
        if changed:
            raise RuntimeError(
                f"the script has changed {changed[0]} on its way to the present epoch, as others have before: use `for "
                "epoch in training.epochs(n)`, which begins there, and change weights in or after its loop over batches"
            )
        if self._found() != self._hashes:
            self._kept.restore()
        self._state.undo_step()
