"""What became of a plugin: its state, and everything known of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import pluggy

from attnquant.hookspecs import Architecture


class State(enum.Enum):
    """What became of a plugin."""

    LOADED = "loaded"
    DISABLED = "disabled"
    INCOMPATIBLE = "incompatible"
    MISSING_DEPENDENCY = "missing dependency"
    FAILED = "failed"
    CONFLICT = "conflict"


@dataclass
class Plugin:
    """One entry point in the group `attnquant.models`, and what became of it.

    Attributes:
        name: The entry point's name.
        distribution: The distribution that declares it.
        version: That distribution's version.
        entry_point: ``module`` or ``module:attribute``.
        state: See `State`.
        reason: Why it is in that state, and what to do; empty when loaded.
        architectures: What it supplies, as far as it got to say.
        exception: What it raised, if it did.
        load_seconds: How long importing it took.
        hook: Its hooks, to be called with keyword arguments.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    state: State = State.LOADED
    reason: str = ""
    architectures: tuple[Architecture, ...] = ()
    exception: BaseException | None = None
    load_seconds: float = 0.0
    hook: pluggy.HookRelay | None = field(default=None, repr=False)

    def set_state(
        self, state: State, reason: str, exception: BaseException | None = None
    ) -> None:
        """Move to a state other than loaded; the reason becomes one line."""
        self.state, self.exception = state, exception
        self.reason = " ".join(reason.split())

    @property
    def origin(self) -> str:
        """Its distribution and version."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def in_trouble(self) -> bool:
        """Whether it is neither loaded nor disabled on purpose."""
        return self.state not in {State.LOADED, State.DISABLED}

    @property
    def identity(self) -> str:
        """What two processes must agree on to have the same plugin, as one line."""
        supplied = ", ".join(
            f"{item.name} ({item.target}, API {item.api_version})"
            for item in self.architectures
        )
        return (
            f"{self.name}: {self.distribution} {self.version}, {self.entry_point},"
            f" {supplied}"
        )
