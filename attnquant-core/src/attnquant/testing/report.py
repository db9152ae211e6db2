"""A pytest plugin that tells in sentences what the conformance kit found.

`attnquant check` runs pytest with it (``-p attnquant.testing.report``).
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from attnquant.testing.pytest_plugin import MARKER


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Put our reporter in the place of pytest's own."""
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Reporter(config), "attnquant-reporter")


class _Reporter:
    """Prints a line a test, in place of pytest's own reporter."""

    def __init__(self, config: pytest.Config) -> None:
        self.plugin = str(config.getoption("--attnquant-plugin"))
        self.passed = self.failed = 0
        self.errors: list[str] = []
        self._sentences: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what stops a file from being collected."""
        if report.failed:
            self.errors.append(str(report.longrepr))

    def pytest_internalerror(self, excrepr: Any) -> None:
        """Keep a failure of pytest itself."""
        self.errors.append(str(excrepr))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Remember what each test says of itself."""
        for item in items:
            text = inspect.getdoc(getattr(item, "obj", None)) or item.name
            mark = item.get_closest_marker(MARKER)
            part = mark.args[0] if mark else ""
            variant = item.name.partition("[")[2].rstrip("]")
            sentence = text.splitlines()[0]
            self._sentences[item.nodeid] = f"{part:10}  {sentence}" + (
                f" ({variant})" if variant else ""
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a test's line once it is known how it came out."""
        if report.when != "call" and not report.failed:
            return
        sentence = self._sentences.get(report.nodeid, report.nodeid)
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            print(f"-       {sentence}  {reason}", flush=True)
            return
        if report.passed:
            self.passed += 1
            print(f"ok      {sentence}  {report.duration:.1f} s", flush=True)
            return
        self.failed += 1
        print(f"FAILED  {sentence}  {report.duration:.1f} s", flush=True)
        crash = getattr(report.longrepr, "reprcrash", None)
        told = str(crash.message if crash else report.longrepr)
        print("\n".join(f"        {line}" for line in told.splitlines()), flush=True)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Print the verdict; without a single test it is none."""
        total = self.passed + self.failed
        if self.errors:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
            print("The tests could not be run:", *self.errors, sep="\n")
        elif not total:
            print(
                "There is no subclass of attnquant.testing.ModelConformance for an"
                f" architecture of {self.plugin}."
            )
        else:
            kept = f"fails {self.failed} of" if self.failed else "keeps all"
            print(f"{self.plugin} {kept} {total} points.")
