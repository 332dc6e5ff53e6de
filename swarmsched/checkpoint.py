"""A checkpoint that the job's register knows: only such a one counts as "latest" (protocol notes, 3.3)."""

from dataclasses import dataclass
from typing import Annotated

from swarmsched.fields import U32, U53, Amount, Digest, MaxLength, NodeName

NAME_LENGTH_MAX = 200


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One file or folder, `name`, in the checkpoint directory of `attempt`.

    `digest` names the packed copy that the agents in `copies` keep; it is empty where the directory is shared by all
    nodes and nothing had to be copied.  `sequence` grows with each commit that this node asks for, over all lives of
    its agent.
    """

    name: Annotated[str, MaxLength(NAME_LENGTH_MAX)]
    attempt: U32
    node: NodeName  # that wrote it
    committed_utc_s: Amount = 0.0
    size_bytes: U53 = 0
    digest: Digest = ""
    copies: Annotated[tuple[NodeName, ...], MaxLength(8)] = ()
    sequence: U53 = 0
