"""A checkpoint that the job's register knows; no other counts as "latest" (docs/explanation/protocol.md, plane C)."""

from typing import Annotated

from msgspec import Meta

from swarmsched.fields import U32, U53, Amount, Digest, NodeName, Value

NAME_LENGTH_MAX = 200


class Checkpoint(Value):
    """One file or folder, `name`, in the checkpoint directory of `attempt`.

    `digest` names the packed copy that the agents in `copies` keep; it is empty where the directory is shared by all
    nodes and nothing had to be copied.  `sequence` grows with each commit that this node asks for, over all lives of
    its agent; sequences of different nodes tell nothing of one another.  `world` is the version of the membership in
    which the writer trained when it named it: 0 in a gang of fixed size, and where it is not known.
    """

    name: Annotated[str, Meta(max_length=NAME_LENGTH_MAX)]
    attempt: U32
    node: NodeName  # that wrote it
    committed_utc_s: Amount = 0.0
    size_bytes: U53 = 0
    digest: Digest = ""
    copies: Annotated[tuple[NodeName, ...], Meta(max_length=8)] = ()
    sequence: U53 = 0
    world: U32 = 0
