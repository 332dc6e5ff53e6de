"""The local health score of Lifeguard (Dadgar, Phillips, Currey, 2018): how far a node trusts its own accusations."""

HEALTH_SCORE_MAX = 8
ACCUSER_SCORE_MAX = 3
"""Above this score a node asks others about a silent peer but does not accuse it."""

LAG_THRESHOLD_S = 0.2
RECOVERY_INTERVAL_S = 5.0


class LocalHealth:
    """Score 0 (healthy) to 8; probe period and timeouts are multiplied by score + 1.

    Missed acknowledgements alone raise it to 3 at most: a node whose loop keeps time and who hears nobody is cut off
    rather than slow, and must still give verdicts.  Lag of the event loop, which proves slowness, raises it further.
    Acknowledged probes lower it, and so does every 5 s without lag, since a node that is cut off gets none.
    """

    def __init__(self) -> None:
        self._score = 0
        self._recover_at_s = 0.0

    @property
    def score(self) -> int:
        """0 to 8."""
        return self._score

    @property
    def multiplier(self) -> int:
        """Factor of probe period and timeouts."""
        return self._score + 1

    @property
    def may_accuse(self) -> bool:
        """False while the node is so slow that its accusations are worth nothing."""
        return self._score <= ACCUSER_SCORE_MAX

    def probe_acknowledged(self) -> None:
        """A probe was answered in time."""
        self._score = max(0, self._score - 1)

    def probe_missed(self) -> None:
        """Nobody answered, helpers neither; or the kernel refused to send."""
        if self._score < ACCUSER_SCORE_MAX:
            self._score += 1

    def lagged(self, lag_s: float, now_s: float) -> None:
        """The loop was late: one point for each second begun, at least one above the threshold."""
        if lag_s > LAG_THRESHOLD_S:
            self._score = min(HEALTH_SCORE_MAX, self._score + 1 + int(min(lag_s, HEALTH_SCORE_MAX)))
            self._recover_at_s = now_s + RECOVERY_INTERVAL_S

    def pass_time(self, now_s: float) -> None:
        """Recover a point for each interval without lag."""
        if now_s >= self._recover_at_s:
            self._recover_at_s = now_s + RECOVERY_INTERVAL_S
            self._score = max(0, self._score - 1)
