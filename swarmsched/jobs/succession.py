"""Which configuration of holders may follow which, and why changing them through the register itself is safe.

The configuration is part of the value, so a round must know a record to know whom to ask.  Three rules make that
sound; the groups of a configuration are its present holders and, while it is joint, the leaving ones, and a quorum
is a majority of each group.

* *A round asks the configuration of the newest record that its promises tell.*  If that is another one than it began
  with, it goes on with that one (`Round.electorate`).  What a promise told stays true, so the newest record only
  becomes newer and the search ends.
* *Every successor of a configuration keeps its holders as a whole group*, as holders or as leaving (`may_follow`).
  So the quorums of a configuration and of all that may come directly after it meet one another, even of two that
  compete for its succession: each holds a majority of that group.
* *A configuration is left only from a decided record*: one that a quorum of its own configuration has accepted under
  one ballot.  A record that was only seen at a minority is first accepted again, unchanged, by a quorum of its own
  configuration.  A joint one thereby needs a majority of the old holders too.

Safety: after a record p is decided under ballot b, every proposal with a higher ballot descends from p.  Suppose q is
the first that does not.  It was made from a record s with a ballot below b, when a quorum Q of s's configuration had
promised q and none of Q had accepted anything above s.  Let a be the last common ancestor of s and p.  Where the path
from a to s, or the one from a to p, changes its configuration later than in the first step, the record before that
change was decided (third rule), and neither of the two may lie off the other's path (every smaller ballot obeys the
theorem): so the path to s has its only change in the first step, if any, and the first record decided on the path
to p after its first step, say d, has a ballot between s and q and the configuration of that step.  By the second rule
a majority of a's holders is part of every quorum of s's and of d's configuration, so somebody in Q accepted d before
it promised q and must have told of it: contradiction.

Finding the present holders from old ones: the first record with another configuration than C was made from a record
that a quorum of C had decided, and is itself accepted by a majority of C's holders before anybody is told that it is
decided.  So any quorum of C knows it or something newer, and from there the next change is found in the same way.

The end of an exchange needs the present holders alone (`Round.deciding`), for every quorum of the joint configuration
has a majority of them: the leaving ones may be lost for good as soon as the joint record is decided.  Whoever finds the
record that ends it knows by the third rule that the joint one was, and need not hear the leaving ones either.

A first record has no predecessor.  All who may create a job must therefore name the same holders, those of its ticket.
A forced change breaks the second rule on purpose: an operator has declared the missing holders dead for good.
"""

from swarmsched.holders import HOLDERS_MAX, Configuration, Holders


def configuration_problem(configuration: Configuration) -> str:
    """What makes it unusable; empty if nothing does."""
    if not 1 <= len(configuration.holders) <= HOLDERS_MAX or not _are_different_nodes(configuration.holders):
        return f"holders must be 1 to {HOLDERS_MAX} different nodes, not {_names(configuration.holders)}"
    if len(configuration.leaving) > HOLDERS_MAX or not _are_different_nodes(configuration.leaving):
        return f"leaving holders must be at most {HOLDERS_MAX} different nodes, not {_names(configuration.leaving)}"
    return ""


def may_follow(following: Configuration, present: Configuration) -> bool:
    """True if a record with `following` may replace one with `present`."""
    return following == present or completes(following, present) or following.leaving == present.holders


def completes(following: Configuration, present: Configuration) -> bool:
    """True if `following` is what is left of `present` when the leaving holders are gone."""
    return following.holders == present.holders and not following.leaving


def _are_different_nodes(holders: Holders) -> bool:
    return len({holder.node for holder in holders}) == len(holders)


def _names(holders: Holders) -> str:
    return ", ".join(holder.node for holder in holders) or "none"
