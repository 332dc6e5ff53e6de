"""One node of the swarm: composes the machines behind a single `step`."""

from swarmsched.node.config import NodeConfig, Restored
from swarmsched.node.node import Node

__all__ = ["Node", "NodeConfig", "Restored"]
