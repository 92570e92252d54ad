"""``report DIR...``: one self-contained HTML page for a run, or a comparison of several."""

from __future__ import annotations

import sys
from pathlib import Path

from .cli import run as run_command
from .config import ReportConfig
from .errors import InputError
from .reporting.comparison_page import comparison_page
from .reporting.html import write_page
from .reporting.run_files import read_run
from .reporting.run_page import run_page


def run(config: ReportConfig) -> None:
    """Write the page and print its path."""
    print(write_report(config))


def write_report(config: ReportConfig) -> Path:
    """Write the page and return its path.

    Raises:
        InputError: a run folder lacks a file or holds a broken one, or the page cannot be written.
    """
    runs = [read_run(path) for path in dict.fromkeys(config.runs)]
    if len(runs) == 1:
        out, text = config.out or runs[0].path / "report.html", run_page(runs[0])
    else:
        out, text = config.out or Path("comparison.html"), comparison_page(runs)
    try:
        write_page(out, text)
    except OSError as error:
        raise InputError(f"{out}: {error.strerror}; choose a file in an existing folder with --out") from error
    return out


if __name__ == "__main__":
    sys.exit(run_command("report"))
