"""Packages of third parties are tested as such: by themselves, not from here."""

collect_ignore = ["thirdparty"]
