"""The swarm-wide setting: one versioned record that every node keeps; the highest (version, node) wins."""

from collections.abc import Callable, Mapping
from typing import Annotated

from msgspec import Meta, field

from swarmsched.errors import RemoteProtocolError, SwarmError
from swarmsched.fields import U53, Name, Real, Value
from swarmsched.ids import NodeId
from swarmsched.view import Elasticity, PolicySetting
from swarmsched.wire.codec import decode_value, encode_value

SETTING_ROOM = "setting"
SETTING_KEY = "swarm"
VERSION_JUMP_LIMIT = 2**20
SETTING_BYTES_LIMIT = 2_048

DEFAULT = PolicySetting()

CheckSetting = Callable[[PolicySetting], None]
"""Raises SwarmError for a policy or parameters that this node cannot use."""


class SwarmSetting(Value):
    """A `PolicySetting` as it travels, flat.  Version 0 is the built-in default, never gossiped."""

    version: U53 = 0
    node_id: Annotated[str, Meta(max_length=63)] = ""  # who set it
    policy: Name = DEFAULT.name
    parameters: Annotated[Mapping[Name, Real], Meta(max_length=16)] = field(default_factory=dict)
    elasticity: Elasticity = DEFAULT.elasticity
    is_restartable: bool = DEFAULT.is_restartable

    @property
    def stamp(self) -> tuple[int, str]:
        """(version, node): larger wins."""
        return (self.version, self.node_id)

    @property
    def policy_setting(self) -> PolicySetting:
        """What policies and planners take."""
        return PolicySetting(self.policy, dict(self.parameters), self.elasticity, self.is_restartable)


class SettingRegister:
    """Holds the setting in force.  Invariant: its stamp never falls."""

    def __init__(self, node_id: NodeId, check: CheckSetting) -> None:
        self._node_id = node_id
        self._check = check
        self.current = SwarmSetting()
        self._refused, self._refusal = (0, ""), ""  # the newest that is of no use here, and why, until it is told

    def propose(self, setting: PolicySetting) -> SwarmSetting:
        """Adopt a new setting of our own; SwarmError if it is not usable, and then nothing has changed."""
        self._check(setting)
        version, parameters = self.current.version + 1, dict(setting.parameters)
        proposed = SwarmSetting(
            version, self._node_id, setting.name, parameters, setting.elasticity, setting.is_restartable
        )
        encode_setting(proposed)
        self.current = proposed
        return proposed

    def offer(self, setting: SwarmSetting) -> bool:
        """Adopt another node's setting if it is newer; RemoteProtocolError if it is not usable here."""
        if setting.stamp <= self.current.stamp:
            return False
        if setting.version > self.current.version + VERSION_JUMP_LIMIT:
            raise RemoteProtocolError(f"version {setting.version} is too far ahead", kind="SwarmSetting")
        try:
            self._check(setting.policy_setting)
        except SwarmError as error:
            if setting.stamp > self._refused:
                self._refused = setting.stamp
                self._refusal = f"version {setting.version}, set on {setting.node_id}: {error}"
            raise RemoteProtocolError(str(error), kind="SwarmSetting") from error
        self.current = setting
        return True

    def take_refusal(self) -> str:
        """Why a setting that was heard cannot be used here; told once for each."""
        told, self._refusal = self._refusal, ""
        return told


def encode_setting(setting: SwarmSetting) -> bytes:
    """Bytes for the wire and for the disk."""
    return encode_value(SwarmSetting, setting)


def decode_setting(body: bytes) -> SwarmSetting:
    """Inverse of `encode_setting`; RemoteProtocolError for anything else."""
    if len(body) > SETTING_BYTES_LIMIT:
        raise RemoteProtocolError(f"{len(body)} bytes, more than {SETTING_BYTES_LIMIT}", kind="SwarmSetting")
    return decode_value(SwarmSetting, body)
