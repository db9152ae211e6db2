"""The exceptions AttnQuant raises: one family, each carrying its facts as attributes.

Every message has the same shape, so that a reader and a script find the same three
things in it: what is wrong (`subject`), what was `expected` and what was `found`,
followed by a `hint` that says what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping


class AttnQuantError(Exception):
    """Base of all errors that AttnQuant raises on purpose.

    Args:
        subject: The variable, tensor, file, plugin or architecture at fault.
        expected: What would have been right.
        found: What was there instead.
        hint: What the user can do about it.
    """

    def __init__(
        self, subject: str, *, expected: str = "", found: str = "", hint: str = ""
    ) -> None:
        self.subject = subject
        self.expected = expected
        self.found = found
        self.hint = hint
        facts = [
            f"expected {expected}" if expected else "",
            f"found {found}" if found else "",
        ]
        message = ", ".join(fact for fact in facts if fact)
        message = f"{subject}: {message}" if message else subject
        super().__init__(f"{message}. {hint}" if hint else message)

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling: a serving worker hands its error to its parent."""
        return (
            _rebuild,
            (type(self), self.subject, self.expected, self.found, self.hint),
        )


def _rebuild(
    cls: type[AttnQuantError], subject: str, expected: str, found: str, hint: str
) -> AttnQuantError:
    return cls(subject, expected=expected, found=found, hint=hint)


class SettingError(AttnQuantError):
    """An environment variable, option or argument is missing, wrong or contradicted."""

    def renamed(self, names: Mapping[str, str]) -> SettingError:
        """Return the error with its subject as the user knows it.

        Args:
            names: Field to the option or variable that set it.
        """
        return SettingError(
            names.get(self.subject, self.subject),
            expected=self.expected,
            found=self.found,
            hint=self.hint,
        )


class CheckpointError(AttnQuantError):
    """A checkpoint (or what it holds) cannot be used as it is."""


class BundleError(CheckpointError):
    """A theta bundle is damaged, incomplete, or newer than this version reads."""


class PluginError(AttnQuantError):
    """A plugin does not keep its part of the contract."""


class ArchitectureError(AttnQuantError):
    """An architecture has no usable plugin; the hint says why, per plugin."""


class ServingError(AttnQuantError):
    """MAX cannot serve this model as asked (device, encoding, version)."""
