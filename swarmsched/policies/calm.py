"""Calm: how long a running job is left as it is, whatever would be gained by another size or other hosts.

Each change costs a job its pause, and plans rest on young measurements: what is undone soon after was wrong once.  A
job that has just changed keeps its size for `JUST_S`, whoever waits: only one of higher priority, or one that has
waited for too long, takes a place from it; and where a change costs it no more than `CHEAP_S`, one that has come since
and would have no place otherwise, since nobody could know of it.  A job that stays gives up GPUs to one that waits, and
is not changed for a gain, its own or another's: after a change until a tenth of its time since its first start has
passed (`SETTLED`), and while another one would make its changes cost more than `PAUSE_BUDGET` of that time.  While
nobody waits, one whose changes cost no more than `CHEAP_S` keeps what it has and may grow at any time.  A job that
reports nothing stays for ten pauses from its start as well (`SILENT_PAUSES`), and while anybody waits: nobody has
measured that it gains.

The failure of a node or of a worker is no such change, and its pause does not count.
"""

from swarmsched.view import JobView

JUST_S = 60.0
CHEAP_S = 0.5
PAUSE_BUDGET = 0.05
AHEAD = 4.0
"""So many pauses may be had before they were earned: with none no short job would ever change, with two, in replays,
the average completion time is 1 % longer, and 8 % where jobs tell that their restarts take minutes."""
SETTLED = 0.1
SILENT_PAUSES = 10.0


def has_just_changed(job: JobView, now_s: float) -> bool:
    """True for `JUST_S` after a change while it ran; its start is none."""
    return bool(job.card.kept_s) and job.kept_s(now_s) <= JUST_S


def yields_to(job: JobView, newcomer: JobView, pause_s: float, now_s: float) -> bool:
    """True of a job that has just changed, which costs it `pause_s`, where the other has come to wait since."""
    return pause_s <= CHEAP_S and newcomer.queued_s(now_s) < job.kept_s(now_s)


def stays(job: JobView, pause_s: float, now_s: float, utc_s: float, *, is_silent: bool) -> bool:
    """True of a running job that is not to be changed for a gain; a change costs it `pause_s`."""
    kept_s = job.kept_s(now_s)
    is_young = bool(job.card.kept_s) and kept_s <= SETTLED * _lived_s(job, now_s, utc_s)
    return _is_spent(job, pause_s, now_s, utc_s) or is_young or (is_silent and kept_s <= SILENT_PAUSES * pause_s)


def may_grow(job: JobView, pause_s: float, now_s: float, utc_s: float, *, is_silent: bool) -> bool:
    """True of a job that has changed lately and may still take GPUs that nobody waits for, at next to no cost."""
    is_cheap = bool(job.card.kept_s) and pause_s <= CHEAP_S and not is_silent
    is_young = job.kept_s(now_s) <= max(JUST_S, SETTLED * _lived_s(job, now_s, utc_s))
    return is_cheap and is_young and not _is_spent(job, pause_s, now_s, utc_s)


def _is_spent(job: JobView, pause_s: float, now_s: float, utc_s: float) -> bool:
    """Whether another change would make changes cost more than they may."""
    return job.card.paused_s + pause_s > PAUSE_BUDGET * _lived_s(job, now_s, utc_s) + AHEAD * pause_s


def _lived_s(job: JobView, now_s: float, utc_s: float) -> float:
    """Seconds since the job first started."""
    return max(job.running_s(now_s), utc_s - job.card.first_started_utc_s if job.card.first_started_utc_s else 0.0)
