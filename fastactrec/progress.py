"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere, nothing on ranks above 0."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
PLAIN_INTERVAL_S = 10.0


def rank() -> int:
    """This process's rank as torchrun sets it; 0 outside a distributed run."""
    return int(os.environ.get("RANK", "0"))


def say(text: str) -> None:
    """One line to stderr, on rank 0 only (stdout carries results)."""
    if rank() == 0:
        print(text, file=sys.stderr, flush=True)


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yield the items, showing count, rate and time left; ``total`` defaults to ``len(items)`` where it has one."""
    if total is None:
        total = len(items) if hasattr(items, "__len__") else None
    if rank() > 0:
        yield from items
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            yield from bar.track(items, total=total, description=description)
        return
    yield from _plain(items, description, total)


def _plain(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    start = last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last >= PLAIN_INTERVAL_S or (done == total and now - start >= PLAIN_INTERVAL_S):
            rate = done / max(now - start, 1e-9)
            left = f", {(total - done) / rate:.0f} s left" if total and done < total else ""
            say(f"{description}: {done}{f'/{total}' if total else ''} ({rate:.1f}/s{left})")
            last = now
