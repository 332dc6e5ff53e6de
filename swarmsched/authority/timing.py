"""Durations of leases and contacts (docs/explanation/protocol.md, plane C), each on the monotonic clock of its side.

Clocks may run 5 % apart: whoever waits for another's time to be over waits `patience_s` of it.
"""

LEASE_TTL_S = 10.0
LEASE_RENEWAL_S = 3.0
LEASE_ACTING_RATIO = 0.95  # of the TTL, from the sending of the renewal that was granted
CONTACT_PERIOD_S = 2.0
FREEZE_AFTER_S = 8.0  # without an answer from a majority of the holders, from the sending of the last answered contact
DRIFT_RATIO = 1.05
MARGIN_S = 0.5


def patience_s(duration_s: float) -> float:
    """How long to wait until a duration is surely over on another's clock."""
    return duration_s * DRIFT_RATIO + MARGIN_S
