"""What a checker raises."""

from swarmsched.simulator.observer import InvariantViolated


class Violation(InvariantViolated):
    """An invariant is broken: its number in docs/explanation/invariants.md, 1 to 17, or its name there, as text."""

    def __init__(self, invariant: int | str, message: str) -> None:
        super().__init__(str(invariant), message)
        self.message = message

    def __reduce__(self) -> tuple[type["Violation"], tuple[str, str]]:
        return (Violation, (self.invariant, self.message))

    def __str__(self) -> str:
        return f"invariant {self.invariant}: {self.message}"
